"""Blocks that look as if they could be cut: names and sizes are right, and what is between them is odd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HIDDEN, TOKENS = 16, 4, 32, 16
SIZE = WIDTH // HEADS


class Mlp(nn.Module):
    """x + fc2(between(fc1(norm(x))))."""

    outputs = HIDDEN

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, self.outputs), nn.Linear(HIDDEN, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        """Make what is between."""

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.between(self.fc1(self.norm(x))))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class Attention(nn.Module):
    """x + proj(mix(q, k, v))."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(WIDTH), HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, self.kv_heads * SIZE) for _ in range(2))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        """Make what is between."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def forward(self, x: Tensor) -> Any:
        return x + self.o_proj(self.mix(*self.heads(x)).transpose(1, 2).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.scores(q @ k.mT / SIZE**0.5)
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        return self.mixed(scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def mixed(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class SoftmaxBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class NormalisedBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return F.normalize(y, dim=-1)


class LayerNormBetween(Mlp):
    def set_up(self) -> None:
        self.inner = nn.LayerNorm(HIDDEN)

    def between(self, y: Tensor) -> Tensor:
        return self.inner(F.gelu(y))  # type: ignore[no-any-return]


class BareLayerNormBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return F.layer_norm(y, (y.shape[-1],))


class GroupNormBetween(Mlp):
    def set_up(self) -> None:
        self.inner = nn.GroupNorm(4, HIDDEN)

    def between(self, y: Tensor) -> Tensor:
        return self.inner(y.mT).mT  # type: ignore[no-any-return]


class InstanceNormBetween(Mlp):
    def set_up(self) -> None:
        self.inner = nn.InstanceNorm1d(HIDDEN, affine=True)

    def between(self, y: Tensor) -> Tensor:
        return self.inner(y.mT).mT  # type: ignore[no-any-return]


class ScaledBetween(Mlp):
    """A weight per feature, multiplied in between."""

    def set_up(self) -> None:
        self.scale = nn.Parameter(torch.linspace(0.5, 2, HIDDEN))

    def between(self, y: Tensor) -> Tensor:
        return y * self.scale


class SlopeBetween(Mlp):
    """One weight for all features."""

    def set_up(self) -> None:
        self.slope = nn.Parameter(torch.tensor(0.3))

    def between(self, y: Tensor) -> Tensor:
        return torch.where(y > 0, y, self.slope * y)


class PReLUBetween(Mlp):
    def set_up(self) -> None:
        self.act = nn.PReLU()

    def between(self, y: Tensor) -> Tensor:
        return self.act(y)  # type: ignore[no-any-return]


class SquareBetween(Mlp):
    """A product of features with features."""

    def set_up(self) -> None:
        self.mixing = nn.Parameter(torch.eye(HIDDEN) + 0.1)

    def between(self, y: Tensor) -> Tensor:
        return y @ self.mixing


class HalvesBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return torch.cat((second, first), -1)


class RolledBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.roll(1, -1)


class MaxedBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y - y.amax(-1, keepdim=True)


class SortedBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.sort(-1).values


class TopBetween(Mlp):
    """Only the largest features stay."""

    def between(self, y: Tensor) -> Tensor:
        return y * (y >= y.kthvalue(HIDDEN // 2 if y.shape[-1] == HIDDEN else 1, -1, keepdim=True).values)


class CountedBetween(Mlp):
    """Asks how many features there are."""

    def between(self, y: Tensor) -> Tensor:
        return y / y.shape[-1] ** 0.5


class PositionBetween(Mlp):
    """Each feature knows its number."""

    def between(self, y: Tensor) -> Tensor:
        return y * torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device).sqrt()


class ResidualBetween(Mlp):
    def forward(self, x: Tensor) -> Any:
        y = self.fc1(self.norm(x))
        return self.fc2(y + x.repeat(1, 1, HIDDEN // WIDTH))


class GatedByInput(Mlp):
    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.fc1(x) * x.mean(-1, keepdim=True).sigmoid())


class SharedInput(Mlp):
    """Two rows take the same column."""

    def set_up(self) -> None:
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.fc1(x))
        return x + self.fc2(y) + self.down(y)


class TwiceUsed(Mlp):
    """The column is run on two inputs."""

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(F.gelu(self.fc1(x)) * self.fc1(2 * x).sigmoid())


class Recurrent(Mlp):
    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = x + self.fc2(F.gelu(self.fc1(x)))
        return x


class ColumnLeaks(Mlp):
    """What the column gives is used beside the row."""

    def forward(self, x: Tensor) -> Any:
        y = self.fc1(x)
        return x + self.fc2(F.gelu(y)) + y.mean(-1, keepdim=True)


class SharedBias(Mlp):
    def set_up(self) -> None:
        self.fc1.bias = None
        self.both = nn.Parameter(torch.full((HIDDEN,), 0.1))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y + self.both) + self.both


class TiedPair(Mlp):
    """The row's weight is the column's, turned round."""

    def forward(self, x: Tensor) -> Any:
        return x + F.gelu(self.fc1(x)) @ self.fc1.weight + self.fc2(F.gelu(self.fc1(x)))


class DirectWeight(Mlp):
    """The row's weight is used without calling it."""

    def forward(self, x: Tensor) -> Any:
        return x + F.linear(F.gelu(self.fc1(x)), self.fc2.weight, self.fc2.bias)


class SlicedWeight(Mlp):
    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(F.gelu(F.linear(x, self.fc1.weight[: HIDDEN // 2]).repeat(1, 1, 2)))


class EinsumWeight(Mlp):
    def forward(self, x: Tensor) -> Any:
        return x + torch.einsum("bth,dh->btd", F.gelu(self.fc1(x)), self.fc2.weight)


class WeightNormed(Mlp):
    def set_up(self) -> None:
        torch.nn.utils.parametrizations.weight_norm(self.fc1)


class SpectralNormed(Mlp):
    def set_up(self) -> None:
        torch.nn.utils.parametrizations.spectral_norm(self.fc2)


class InPlaceBetween(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.mul_(2).relu_()


class DroppedBetween(Mlp):
    def set_up(self) -> None:
        self.dropout = nn.Dropout(0.4)

    def between(self, y: Tensor) -> Tensor:
        return self.dropout(F.gelu(y))  # type: ignore[no-any-return]


class Penalised(Mlp):
    """A loss beside the output, of what is between."""

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.fc1(x))
        return x + self.fc2(y), y.square().sum() * 1e-3


class Gates(Mlp):
    outputs = 2 * HIDDEN

    def set_up(self) -> None:
        self.gate_up_proj, self.down_proj = self.fc1, self.fc2
        del self.fc1, self.fc2

    def forward(self, x: Tensor) -> Any:
        return x + self.down_proj(self.gate(self.gate_up_proj(x)))

    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


class GatesInTurns(Gates):
    def gate(self, both: Tensor) -> Tensor:
        return F.silu(both[..., ::2]) * both[..., 1::2]


class GatesCrossed(Gates):
    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up.flip(-1)


class Mixture(nn.Module):
    """Experts that are MLPs, all of them run and weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class ChosenMixture(Mixture):
    """Each token passes the expert that its gate says."""

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        best = torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
        return x + sum((weights * best)[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class FusedExperts(nn.Module):
    """Weights of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 4)
        self.experts.down_proj = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 6)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(torch.einsum("btd,edh->bteh", x, self.experts.up_proj))
        return x + torch.einsum("bteh,ehd,bte->btd", y, self.experts.down_proj, self.gate(x).softmax(-1))


class TokensMixed(Mlp):
    """An MLP over tokens, as in MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(TOKENS, HIDDEN), nn.Linear(HIDDEN, TOKENS)

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x).mT))).mT


class ConvolvedTokens(Mlp):
    def set_up(self) -> None:
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN)

    def between(self, y: Tensor) -> Tensor:
        return self.conv(F.pad(y.mT, (2, 0))).mT  # type: ignore[no-any-return]


class ConvolvedOutside(Mlp):
    def set_up(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.conv(F.pad(x.mT, (2, 0))).mT)


class Pooled(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + x.mean(1, keepdim=True)


class Shifted(Mlp):
    """Each token sees the one before it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(F.pad(x, (0, 0, 1, -1)))


class Positioned(Mlp):
    """Adds positions that it counts itself."""

    def set_up(self) -> None:
        self.positions = nn.Embedding(4 * TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.positions(torch.arange(x.shape[1], device=x.device)))


class Summed(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.cumsum(1) / 4)


class PerHeadNorms(Attention):
    """Qwen3's."""

    def set_up(self) -> None:
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE, eps=1e-6), nn.RMSNorm(SIZE, eps=1e-6)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class WideNorms(Attention):
    """OLMo2's."""

    def set_up(self) -> None:
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        split = (self.q_norm(self.q_proj(y)), self.k_norm(self.k_proj(y)), self.v_proj(y))
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in split)
        return q, k, v


class TalkingHeads(Attention):
    def set_up(self) -> None:
        self.talk = nn.Parameter(torch.eye(HEADS) + 0.1)

    def scores(self, scores: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", scores, self.talk)


class HeadsAveraged(Attention):
    def scores(self, scores: Tensor) -> Tensor:
        return scores + scores.mean(1, keepdim=True)


class RelativeBias(Attention):
    """A bias for each head and distance."""

    def set_up(self) -> None:
        self.bias = nn.Embedding(4 * TOKENS, HEADS)

    def scores(self, scores: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        return scores + self.bias((tokens[:, None] - tokens).abs()).permute(2, 0, 1)


class Alibi(Attention):
    """A slope for each head, by its number."""

    def scores(self, scores: Tensor) -> Tensor:
        heads = scores.shape[1]
        slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=scores.dtype, device=scores.device)
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        return scores - slopes[:, None, None] * (tokens[:, None] - tokens).abs()


class Temperatures(Attention):
    """A temperature for each head."""

    def set_up(self) -> None:
        self.temperature = nn.Parameter(torch.linspace(0.5, 2, HEADS)[:, None, None])

    def scores(self, scores: Tensor) -> Tensor:
        return scores * self.temperature


class Sinks(Attention):
    """A logit for each head that nothing is behind, as gpt-oss has it."""

    def set_up(self) -> None:
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def mixed(self, weights: Tensor, v: Tensor) -> Tensor:
        return (weights @ v) * self.sinks[: v.shape[1], None, None].sigmoid()


class GroupedQueries(Attention):
    kv_heads = 2


class OneKeyHead(Attention):
    kv_heads = 1


class TiedQueries(Attention):
    """Queries and keys are one."""

    def set_up(self) -> None:
        self.k_proj = self.q_proj


class CrossedHeads(Attention):
    """Each head of queries meets another one's keys."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mix(q, k.roll(1, 1), v)


class CountedHeads(Attention):
    """Heads are counted in what it was built from."""

    def set_up(self) -> None:
        self.config = SimpleNamespace(num_heads=HEADS, width=WIDTH)
        del self.num_heads

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, shape = self.norm(x), (*x.shape[:2], self.config.num_heads, -1)
        q, k, v = (p(y).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v


class WidthsOfInput(Attention):
    """nanoGPT's: widths are those of the input."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (b, t, width), y = x.shape, self.norm(x)
        shape = (b, t, self.num_heads, width // self.num_heads)
        q, k, v = (p(y).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v


class GatedHeads(Attention):
    """What heads give is gated by the input."""

    def set_up(self) -> None:
        self.head_gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Any:
        mixed = self.mix(*self.heads(x)) * self.head_gate(x).sigmoid().transpose(1, 2)[..., None]
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2))


class Flat(Attention):
    """An attention and an MLP in one module."""

    def set_up(self) -> None:
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


class Parallel(Flat):
    def forward(self, x: Tensor) -> Any:
        return Attention.forward(self, x) + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round, as transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Turned(nn.Module):
    """GPT-2's block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.split_size, self.embed_dim = HEADS, WIDTH, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(HIDDEN, WIDTH), "c_proj": Conv1D(WIDTH, HIDDEN)})

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.c_attn(x).split(self.split_size, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](x)))


class Bert(nn.Module):
    """BERT's layer: a pair reaches over modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": BertSelf(), "output": nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, HIDDEN)})
        self.output = nn.ModuleDict({"dense": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention["output"]["dense"](self.attention["self"](x))
        return x + self.output["dense"](F.gelu(self.intermediate["dense"](x)))


class BertSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = HEADS, SIZE, WIDTH
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        shape = (*x.shape[:2], self.num_attention_heads, self.attention_head_size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)


class Adapted(Attention):
    """With LoRA, as PEFT writes it."""

    def set_up(self) -> None:
        for name in ("q_proj", "v_proj", "o_proj"):
            setattr(self, name, Adapter(getattr(self, name)))


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.3)})

    def forward(self, x: Tensor) -> Any:
        given = self.base_layer(x)
        return given + 2 * self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


class TiedInside(nn.Module):
    """Two MLPs that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp()
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


PAIRED = {
    LayerNormBetween, SlopeBetween, PReLUBetween, InPlaceBetween, TwiceUsed, Recurrent, Gates,
    GatesInTurns, PerHeadNorms, WideNorms, GroupedQueries, CountedHeads, Flat, Parallel, Turned, Bert, Mixture, Adapted,
}  # fmt: skip
"""Those that can be cut in pairs at tp=2."""

ODD: list[type[nn.Module]] = [
    found
    for name, found in list(globals().items())
    if isinstance(found, type)
    and issubclass(found, nn.Module)
    and name not in ("Mlp", "Attention", "Conv1D", "BertSelf", "Adapter")
]

BLIND = {block for block in ODD if issubclass(block, Attention | Bert | Turned)} | {
    GroupNormBetween, InstanceNormBetween, TokensMixed, ConvolvedTokens, ConvolvedOutside, Pooled, Shifted, Positioned,
    Summed,
}  # fmt: skip
"""Those that look at other tokens than the one in question, and know of no slices."""

COUNTING = {SpectralNormed}
"""Those whose buffers each forward changes."""
