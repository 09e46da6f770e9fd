"""Blocks that look as if they could be cut over tp: names and sizes are right, and what is between layers is odd.

ODD has them by name, made of a few bases by tables of what they have and do otherwise.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.parallel.context.context_parallel import Context

WIDTH, HEADS, HIDDEN, TOKENS = 16, 4, 32, 16
SIZE = WIDTH // HEADS


class Mlp(nn.Module):
    """x + fc2(between(fc1(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        for name, value in self.has().items():
            setattr(self, name, value)

    def has(self) -> Mapping[str, Any]:
        """Attributes that a kind has besides, or instead."""
        return {}

    def forward(self, x: Tensor) -> Any:
        return x + self.fc2(self.between(self.fc1(self.norm(x))))

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class Gates(Mlp):
    """Gates and values of one product."""

    def has(self) -> Mapping[str, Any]:
        return {"fc1": None, "gate_up_proj": nn.Linear(WIDTH, 2 * HIDDEN), "fc2": None, "down_proj": self.fc2}

    def forward(self, x: Tensor) -> Any:
        gate, up = self.split(self.gate_up_proj(x))
        return x + self.down_proj(F.silu(gate) * up)

    def split(self, both: Tensor) -> Any:
        return both.chunk(2, -1)


class Mixture(nn.Module):
    """Experts that are MLPs, all of them run and weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class FusedExperts(nn.Module):
    """Weights of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.gate, self.experts = HEADS, nn.Linear(WIDTH, 4), nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 4)
        self.experts.down_proj = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 6)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(torch.einsum("btd,edh->bteh", x, self.experts.up_proj))
        return x + torch.einsum("bteh,ehd,bte->btd", y, self.experts.down_proj, self.gate(x).softmax(-1))


class Attention(nn.Module):
    """x + o_proj(mix(q, k, v)), causal."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(WIDTH), HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, self.kv_heads * SIZE) for _ in range(2))
        for name, value in self.has().items():
            setattr(self, name, value)

    def has(self) -> Mapping[str, Any]:
        return {}

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        flat = self.projected(self.q_proj(y), self.k_proj(y), self.v_proj(y))
        heads = self.headed(*(self.apart(part, x).transpose(1, 2) for part in flat))
        return x + self.o_proj(self.mix(*heads).transpose(1, 2).flatten(2))

    def projected(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def apart(self, part: Tensor, x: Tensor) -> Tensor:
        return part.unflatten(-1, (-1, SIZE))

    def headed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.mT / SIZE**0.5
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        return self.mixed(scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    def mixed(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class Flat(Attention):
    """An attention and an MLP in one module."""

    def has(self) -> Mapping[str, Any]:
        return {"fc1": nn.Linear(WIDTH, HIDDEN), "fc2": nn.Linear(HIDDEN, WIDTH)}

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(samples, tokens, heads, size) to (samples, tokens, heads * size)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """Queries, keys and values of one product: (3, heads, size), as timm has it."""

    outputs = 3 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(WIDTH), HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, self.outputs), nn.Linear(WIDTH, WIDTH)
        vars(self).update(self.has())

    def has(self) -> Mapping[str, Any]:
        return {}

    def forward(self, x: Tensor) -> Any:
        return x + self.proj(self.mix(self.qkv(self.norm(x))))

    def mix(self, fused: Tensor) -> Tensor:
        return attend(*fused.unflatten(-1, (3, self.num_heads, -1)).unbind(2))


class Phi3(Fused):
    """[q; k; v] with fewer heads of keys and values."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        parts = fused.split([n * fused.shape[-1] // 4 for n in (2, 1, 1)], -1)
        return attend(*(part.unflatten(-1, (-1, SIZE)) for part in parts))


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round, as transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / nx**0.5), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # whose forward is known


class Turned(nn.Module):
    """GPT-2's block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.split_size, self.embed_dim = HEADS, WIDTH, WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(HIDDEN, WIDTH), "c_proj": Conv1D(WIDTH, HIDDEN)})

    def forward(self, x: Tensor) -> Any:
        parts = (part.unflatten(-1, (-1, SIZE)) for part in self.c_attn(x).split(self.split_size, 2))
        x = x + self.c_proj(attend(*parts))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](x)))


class Bert(nn.Module):
    """BERT's MLP: a pair reaches over modules."""

    def __init__(self) -> None:
        super().__init__()
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, HIDDEN)})
        self.output = nn.ModuleDict({"dense": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        return x + self.output["dense"](F.gelu(self.intermediate["dense"](x)))


Mix = Callable[[Any, Tensor, Context | None], Tensor]


class Attending(nn.Module):
    """x + proj(mix(attention(x))): an attention that sees the whole of a sequence that is cut."""

    def __init__(self, mix: Mix = lambda self, y, context: y) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = mix
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor, context: Context | None = None, past: Past | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if context is not None:
            mixed = context.attend(q, k, v)
        else:
            k, v = (k, v) if past is None else past.extend(self, k, v)
            queries = torch.arange(q.shape[-2], device=x.device) + (0 if past is None else past.seen)
            mask = torch.arange(k.shape[-2], device=x.device) <= queries[:, None]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.proj(self.mix(self, mixed.transpose(1, 2).flatten(2), context))


Table = Mapping[type[nn.Module], Mapping[str, Mapping[str, Any]]]
MLPS: Table = {
    Mlp: {
        "SoftmaxBetween": {"between": lambda self, y: y.softmax(-1)},
        "HalvesBetween": {"between": lambda self, y: torch.cat((y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1)},
        "LayerNormBetween": {
            "has": lambda self: {"inner": nn.LayerNorm(HIDDEN)},
            "between": lambda self, y: self.inner(F.gelu(y)),
        },
        "ScaledBetween": {  # a weight per feature
            "has": lambda self: {"scale": nn.Parameter(torch.linspace(0.5, 2, HIDDEN))},
            "between": lambda self, y: y * self.scale,
        },
        "SlopeBetween": {  # one weight for all features
            "has": lambda self: {"slope": nn.Parameter(torch.tensor(0.3))},
            "between": lambda self, y: torch.where(y > 0, y, self.slope * y),
        },
        "SquareBetween": {  # a product of features with features
            "has": lambda self: {"mixing": nn.Parameter(torch.eye(HIDDEN) + 0.1)},
            "between": lambda self, y: y @ self.mixing,
        },
        "SharedInput": {  # two rows take the same column
            "has": lambda self: {"down": nn.Linear(HIDDEN, WIDTH)},
            "forward": lambda self, x: x + self.fc2(y := F.gelu(self.fc1(x))) + self.down(y),
        },
        "SpectralNormed": {"has": lambda self: {"fc2": spectral_norm(self.fc2)}},
        "ColumnLeaks": {"forward": lambda self, x: x + self.fc2(F.gelu(y := self.fc1(x))) + y.mean(-1, keepdim=True)},
        "Penalised": {  # a loss beside the output, of what is between
            "forward": lambda self, x: (x + self.fc2(y := F.gelu(self.fc1(x))), y.square().sum() * 1e-3)
        },
        "TwiceUsed": {"forward": lambda self, x: x + self.fc2(F.gelu(self.fc1(x)) * self.fc1(2 * x).sigmoid())},
        "TokensMixed": {  # an MLP over tokens, as in MLP-Mixer
            "has": lambda self: {"fc1": nn.Linear(TOKENS, HIDDEN), "fc2": nn.Linear(HIDDEN, TOKENS)},
            "forward": lambda self, x: x + self.fc2(F.gelu(self.fc1(self.norm(x).mT))).mT,
        },
        "Positioned": {  # adds positions that it counts itself
            "has": lambda self: {"positions": nn.Embedding(4 * TOKENS, WIDTH)},
            "forward": lambda self, x: Mlp.forward(self, x + self.positions(torch.arange(x.shape[1], device=x.device))),
        },
    },
    Gates: {"GatesInTurns": {"split": lambda self, both: both.unflatten(-1, (-1, 2)).unbind(-1)}},
}
ATTENTIONS: Table = {
    Attention: {
        "PerHeadNorms": {  # Qwen3's
            "has": lambda self: {"q_norm": nn.RMSNorm(SIZE, eps=1e-6), "k_norm": nn.LayerNorm(SIZE)},
            "headed": lambda self, q, k, v: (self.q_norm(q), self.k_norm(k), v),
        },
        "WideNorms": {  # OLMo2's
            "has": lambda self: {name: nn.RMSNorm(WIDTH, eps=1e-6) for name in ("q_norm", "k_norm")},
            "projected": lambda self, q, k, v: (self.q_norm(q), self.k_norm(k), v),
        },
        "Sinks": {  # a logit for each head that nothing is behind, as gpt-oss has it
            "has": lambda self: {"sinks": nn.Parameter(torch.linspace(-1, 1, HEADS))},
            "mixed": lambda self, weights, v: weights @ v * self.sinks[: v.shape[1], None, None].sigmoid(),
        },
        "GroupedQueries": {"kv_heads": 2},
        "OneKeyHead": {"kv_heads": 1},
        "TiedQueries": {"has": lambda self: {"k_proj": self.q_proj}},
        "WidthsOfInput": {  # nanoGPT's
            "apart": lambda self, part, x: part.view(*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)
        },
    },
    Fused: {
        "NeoX": {  # (heads, 3, size), as GPT-NeoX and BLOOM have it
            "mix": lambda self, fused: attend(*fused.unflatten(-1, (self.num_heads, 3, -1)).unbind(3))
        },
        "Configured": {  # heads are counted where no cut sees it
            "has": lambda self: {"cfg": SimpleNamespace(n_heads=HEADS)},
            "mix": lambda self, fused: attend(
                *(part.view(*fused.shape[:2], self.cfg.n_heads, -1) for part in fused.chunk(3, -1))
            ),
        },
        "SummedHeads": {  # heads are mixed between the pair
            "mix": lambda self, fused: Fused.mix(self, fused).unflatten(-1, (self.num_heads, -1)).cumsum(2).flatten(2)
        },
    },
}


def made(table: Table, *classes: type[nn.Module]) -> dict[str, type[nn.Module]]:
    """Return the classes of a table, and others, by their names."""
    return {kind.__name__: kind for kind in classes} | {
        name: type(name, (base,), dict(has)) for base, of_base in table.items() for name, has in of_base.items()
    }


ODD_ATTENTIONS = made(ATTENTIONS, Flat, Fused, Phi3, Turned)
ODD = made(MLPS, Gates, Mixture, FusedExperts, Bert) | ODD_ATTENTIONS
PAIRED = {
    *("LayerNormBetween", "SlopeBetween", "TwiceUsed", "Gates", "GatesInTurns", "Mixture", "Bert", "Flat"),
    *("PerHeadNorms", "WideNorms", "GroupedQueries", "Turned", "Fused", "NeoX", "Phi3", "Configured"),
}
"""Blocks that can be cut in pairs at tp=2."""
BLIND = {*ODD_ATTENTIONS, "TokensMixed", "Positioned"}
"""Blocks that read other tokens than the current one, and support no slices."""
COUNTING = {"SpectralNormed"}
"""Blocks whose buffers each forward changes."""
