"""Attentions that look as if they could be cut: names and sizes are right, and what is done with heads is odd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_mlps import HEADS, HIDDEN, SIZE, TOKENS, WIDTH


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


class PerHeadNorms(Attention):
    """Qwen3's."""

    def set_up(self) -> None:
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE, eps=1e-6), nn.LayerNorm(SIZE)

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
    """Outputs of heads are gated by the input."""

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


Conv1D.__module__ = "transformers.pytorch_utils"  # whose forward is known


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
