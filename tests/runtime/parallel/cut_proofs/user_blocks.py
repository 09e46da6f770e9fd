"""Blocks as users write them, trained on a mesh with a proof of what is cut, and in one process."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.blocks.block_outlines import Blocks, build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.tensor.parameter_shards import shard_of

from ...toys import sgd

WIDTH, HEADS, TOKENS, SAMPLES = 16, 4, 8, 4
SIZE = WIDTH // HEADS
X = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """(samples, tokens, heads, size) to (samples, tokens, heads * size)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (
        F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more).transpose(1, 2).flatten(2)
    )


class SelfAttention(nn.Module):
    """Common parts of these blocks; `heads` follows from the count, which a cut divides."""

    outputs = 3 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.num_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, self.outputs), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.mix(self.qkv(self.norm(x))))  # type: ignore[no-any-return]

    def mix(self, fused: Tensor) -> Tensor:
        raise NotImplementedError


class NeoX(SelfAttention):
    """(heads, 3, size), as GPT-NeoX and BLOOM have it."""

    def mix(self, fused: Tensor) -> Tensor:
        return attend(*fused.unflatten(-1, (self.num_heads, 3, -1)).unbind(3))


class Timm(SelfAttention):
    """(3, heads, size), as timm has it."""

    def mix(self, fused: Tensor) -> Tensor:
        return attend(*fused.unflatten(-1, (3, self.num_heads, -1)).unbind(2))


class MegatronGroups(SelfAttention):
    """(groups, heads of a group + 2, size), as Megatron has queries that share keys."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        groups = fused.unflatten(-1, (-1, 4, SIZE))
        q, k, v = groups.split((2, 1, 1), -2)
        return attend(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))


class Phi3(SelfAttention):
    """[q; k; v] with fewer heads of keys and values."""

    outputs = WIDTH + 2 * 2 * SIZE

    def mix(self, fused: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, SIZE)) for t in fused.split([n * fused.shape[-1] // 4 for n in (2, 1, 1)], -1))
        return attend(q, k, v)


class TalkingHeads(Timm):
    """Heads are mixed between the pair."""

    def mix(self, fused: Tensor) -> Tensor:
        return super().mix(fused).unflatten(-1, (self.num_heads, -1)).cumsum(2).flatten(2)


class Configured(SelfAttention):
    """Heads are counted where no cut sees it: `view(b, t, cfg.n_heads, -1)`."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(n_heads=HEADS)

    def mix(self, fused: Tensor) -> Tensor:
        b, t, _ = fused.shape
        return attend(*(part.view(b, t, self.cfg.n_heads, -1) for part in fused.chunk(3, -1)))


class Mlp(nn.Module):
    outputs = 32

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, self.outputs), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.dropout(self.between(self.fc1(self.norm(x)))))  # type: ignore[no-any-return]

    def between(self, y: Tensor) -> Tensor:
        return F.gelu(y)


class Softmax(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class Normalised(Mlp):
    def between(self, y: Tensor) -> Tensor:
        return F.normalize(y, dim=-1)


class Swapped(Mlp):
    def between(self, y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return torch.cat((second, first), -1)


class Gates(nn.Module):
    """[gate; up] in one product, as timm's packed SwiGLU and Phi-3 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.split(self.gate_up(x))
        return x + self.fc2(F.silu(gate) * up)  # type: ignore[no-any-return]

    def split(self, both: Tensor) -> tuple[Tensor, ...]:
        return both.chunk(2, -1)


class InterleavedGates(Gates):
    def split(self, both: Tensor) -> tuple[Tensor, ...]:
        return both.unflatten(-1, (-1, 2)).unbind(-1)


class Biased(NeoX):
    """Wants something beside the tokens, so that nobody can try it before a batch comes."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + shift[..., None])


class Zeroed(Softmax):
    """Starts as the identity, so that its own weights would prove anything."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.fc2.weight)


def trained_alone(blocks: Blocks, extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model = build_model(blocks, 0, torch.float64)
    stepper = sgd(list(model.parameters()))
    for _ in range(2):
        stepper.zero_grad()
        output = X
        for block in model:
            output = block(output, **{name: extra for name, extra in extras.items() if type(block) is Biased})
        (F.mse_loss(output, Y, reduction="sum") / (SAMPLES * TOKENS)).backward()
        stepper.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, targets, reduction="sum"), torch.tensor(output.numel() / WIDTH, dtype=torch.float64)


def train(
    mesh: str, blocks: Blocks, *, schedule: str = "gpipe", extras: Mapping[str, Tensor] | None = None, **more: Any
) -> tuple[dict[str, Tensor], set[str], Engine]:
    """Train on a mesh; return all weights, the names of those that are cut, and the engine of the first rank."""
    slices = more.pop("slices", None)
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **({} if slices is None else {"slices": slices}))

    def run(transport: Transport) -> tuple[dict[str, Tensor], set[str], Engine]:
        engine = Engine(plan, blocks, loss, sgd, transport=transport, dtype=torch.float64, **more)
        for _ in range(2):
            engine.step(X, Y, **(extras or {}))
        cut = {n for stage in engine.stages.values() for n, p in stage.named_weights().items() if shard_of(p)}
        return engine.full_weights(), cut, engine

    ranks = run_local(plan.mesh.size, run)
    weights = {name: weight for rank in ranks for name, weight in rank[0].items()}
    return weights, set().union(*(rank[1] for rank in ranks)), ranks[0][2]


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= 1e-9 * max(1.0, float(weight.abs().max())), name


def refusal(mesh: str, blocks: Blocks, **more: Any) -> str:
    with pytest.raises(MisfitError) as caught:
        train(mesh, blocks, **more)
    return str(caught.value).removesuffix("\non rank 0 of 2")
