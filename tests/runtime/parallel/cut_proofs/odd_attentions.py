"""Attentions that look as if they could be cut: names and sizes are right, and what is done with heads is odd."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_mlps import HEADS, HIDDEN, SIZE, TOKENS, WIDTH, made


class Attention(nn.Module):
    """x + o_proj(mix(q, k, v)), causal."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(WIDTH), HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, self.kv_heads * SIZE) for _ in range(2))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        for name, value in self.has().items():
            setattr(self, name, value)

    def has(self) -> Mapping[str, Any]:
        """Attributes that a kind has besides, or instead."""
        return {}

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        flat = self.projected(self.q_proj(y), self.k_proj(y), self.v_proj(y))
        heads = self.headed(*(self.apart(part, x).transpose(1, 2) for part in flat))
        return x + self.o_proj(self.mix(x, *heads).transpose(1, 2).flatten(2))

    def projected(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def apart(self, part: Tensor, x: Tensor) -> Tensor:
        return part.unflatten(-1, (-1, SIZE))

    def headed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.scores(q @ k.mT / SIZE**0.5)
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        return self.mixed(scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def mixed(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class RelativeBias(Attention):
    """A bias for each head and distance."""

    def has(self) -> Mapping[str, Any]:
        return {"bias": nn.Embedding(4 * TOKENS, HEADS)}

    def scores(self, scores: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        return scores + self.bias((tokens[:, None] - tokens).abs()).permute(2, 0, 1)


class Alibi(Attention):
    """A slope for each head, by its number."""

    def scores(self, scores: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        return scores - slopes[:, None, None] * (tokens[:, None] - tokens).abs()


class CountedHeads(Attention):
    """Heads are counted in what it was built from."""

    def has(self) -> Mapping[str, Any]:
        del self.num_heads
        return {"config": SimpleNamespace(num_heads=HEADS, width=WIDTH)}

    def apart(self, part: Tensor, x: Tensor) -> Tensor:
        return part.view(*x.shape[:2], self.config.num_heads, -1)


class Flat(Attention):
    """An attention and an MLP in one module."""

    def has(self) -> Mapping[str, Any]:
        return {"fc1": nn.Linear(WIDTH, HIDDEN), "fc2": nn.Linear(HIDDEN, WIDTH)}

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


SEPARATE: Mapping[type[nn.Module], Mapping[str, Mapping[str, Any]]] = {
    Attention: {
        "PerHeadNorms": {  # Qwen3's
            "has": lambda self: {"q_norm": nn.RMSNorm(SIZE, eps=1e-6), "k_norm": nn.LayerNorm(SIZE)},
            "headed": lambda self, q, k, v: (self.q_norm(q), self.k_norm(k), v),
        },
        "WideNorms": {  # OLMo2's
            "has": lambda self: {name: nn.RMSNorm(WIDTH, eps=1e-6) for name in ("q_norm", "k_norm")},
            "projected": lambda self, q, k, v: (self.q_norm(q), self.k_norm(k), v),
        },
        "TalkingHeads": {
            "has": lambda self: {"talk": nn.Parameter(torch.eye(HEADS) + 0.1)},
            "scores": lambda self, scores: torch.einsum("bhqk,hg->bgqk", scores, self.talk),
        },
        "HeadsAveraged": {"scores": lambda self, scores: scores + scores.mean(1, keepdim=True)},
        "Temperatures": {  # one for each head
            "has": lambda self: {"temperature": nn.Parameter(torch.linspace(0.5, 2, HEADS)[:, None, None])},
            "scores": lambda self, scores: scores * self.temperature,
        },
        "Sinks": {  # a logit for each head that nothing is behind, as gpt-oss has it
            "has": lambda self: {"sinks": nn.Parameter(torch.linspace(-1, 1, HEADS))},
            "mixed": lambda self, weights, v: weights @ v * self.sinks[: v.shape[1], None, None].sigmoid(),
        },
        "GroupedQueries": {"kv_heads": 2},
        "OneKeyHead": {"kv_heads": 1},
        "TiedQueries": {"has": lambda self: {"k_proj": self.q_proj}},
        "CrossedHeads": {"headed": lambda self, q, k, v: (q, k.roll(1, 1), v)},
        "WidthsOfInput": {  # nanoGPT's
            "apart": lambda self, part, x: part.view(*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)
        },
        "GatedHeads": {  # by the input
            "has": lambda self: {"head_gate": nn.Linear(WIDTH, HEADS)},
            "mix": lambda self, x, *heads: (
                Attention.mix(self, x, *heads) * self.head_gate(x).sigmoid().transpose(1, 2)[..., None]
            ),
        },
        "Adapted": {  # with LoRA, as PEFT writes it
            "has": lambda self: {name: Adapter(getattr(self, name)) for name in ("q_proj", "v_proj", "o_proj")}
        },
    },
    Flat: {
        "Parallel": {"forward": lambda self, x: Attention.forward(self, x) + self.fc2(F.gelu(self.fc1(self.norm(x))))}
    },
}


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


class MegatronGroups(Fused):
    """(groups, heads of a group + 2, size), as Megatron has queries that share keys."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        q, k, v = fused.unflatten(-1, (-1, 4, SIZE)).split((2, 1, 1), -2)
        return attend(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))


class Phi3(Fused):
    """[q; k; v] with fewer heads of keys and values."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        parts = fused.split([n * fused.shape[-1] // 4 for n in (2, 1, 1)], -1)
        return attend(*(part.unflatten(-1, (-1, SIZE)) for part in parts))


FUSED: Mapping[type[nn.Module], Mapping[str, Mapping[str, Any]]] = {
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
    }
}


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
    """BERT's layer: a pair reaches over modules."""

    def __init__(self) -> None:
        super().__init__()
        dense = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})
        self.attention = nn.ModuleDict({"self": BertSelf(), "output": dense})
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
        mixed = attend(*(layer(x).view(shape) for layer in (self.query, self.key, self.value)))
        return mixed.reshape(*x.shape[:2], self.all_head_size)


CLASSES = (RelativeBias, Alibi, CountedHeads, Flat, Fused, MegatronGroups, Phi3, Turned, Bert)
ODD_ATTENTIONS = {kind.__name__: kind for kind in CLASSES} | made(SEPARATE) | made(FUSED)
