"""Training of blocks on a mesh, beside the same blocks in one process: what is cut, and whether it is equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import ColumnParallelLinear, Engine, Transport, run_local
from quintsched.runtime.parallel.tensor.parameter_shards import shard_of

from ....helpers.refusals import refusals
from ....helpers.training import Outcome, require_equal
from ...toys import sgd
from .odd_blocks import TOKENS, WIDTH, Mlp

Between = Callable[[Any, Tensor], Tensor]


def batch(seed: int, scale: float = 1.0, samples: int = 4, length: int = TOKENS) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, length, WIDTH, generator=random, dtype=torch.float64)
    return scale * x, y


BATCHES = [batch(1), batch(2)]
SCALED = [batch(seed, scale) for seed, scale in enumerate((1.0, 30.0, 0.01))]
"""Batches of which one has large numbers, and one has small ones."""


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return squares added up over tokens."""
    return (output - targets).square().sum(), torch.tensor(targets.numel() / WIDTH, dtype=torch.float64)


@dataclass(frozen=True)
class Trained(Outcome):
    """Results of one rank; the last loss may be that of an evaluation."""

    engine: Any = None

    @property
    def cut(self) -> set[str]:
        """Names of the weights of which it has a shard."""
        stages = self.engine.stages.values()
        return {name for stage in stages for name, weight in stage.named_weights().items() if shard_of(weight)}

    @property
    def has_pairs(self) -> bool:
        modules = (module for stage in self.engine.stages.values() for module in stage.modules())
        return any(isinstance(module, ColumnParallelLinear) and module.pair is not None for module in modules)


def train_rank(
    transport: Transport,
    mesh: str,
    blocks: Any,
    batches: Sequence[tuple[Tensor, Tensor]] = BATCHES,
    *,
    extras: Any = None,
    change: Callable[[nn.Module, int], object] = lambda block, step: None,
    evaluates: bool = False,
    **more: Any,
) -> Trained:
    """Train on one rank; `change` is called with each block before a step, `more` is for the compiler or the engine."""
    asked = {name: more.pop(name) for name in ("schedule", "microbatches", "slices") if name in more}
    plan = qs.compile(**{"schedule": "gpipe", "microbatches": 2} | asked, mesh=mesh)
    more = {"loss_fn": loss, "dtype": torch.float64} | more
    engine, losses, given = Engine(plan, blocks, optimizer=sgd, transport=transport, **more), [], extras or {}
    for step, pair in enumerate(batches):
        for stage in engine.stages.values():
            for block in stage.blocks.values():
                change(block, step)
        x, y = (tensor.chunk(engine.num_replicas)[engine.replica] for tensor in pair)
        losses.append(engine.step(x, y, **(given(step) if callable(given) else given)).loss.item())
    if evaluates:
        losses.append(engine.evaluate(x, y, **given).loss.item())
    return Trained(losses, engine.full_weights(), engine=engine)


def train(mesh: str, blocks: Any, *given: Any, **more: Any) -> list[Trained]:
    """Train on all ranks of a mesh."""
    return run_local(qs.Mesh.parse(mesh).size, lambda transport: train_rank(transport, mesh, blocks, *given, **more))


def train_equal(mesh: str, blocks: Any, **more: Any) -> Trained:
    """Train on a mesh, and require equality with one process; return what the first rank has."""
    ranks = train(mesh, blocks, **more)
    require_equal(ranks, train("pp=1", blocks, extras=more.get("extras"))[0], 1e-9)
    return ranks[0]


def refusal(mesh: str, blocks: Any, *given: Any, **more: Any) -> str:
    """Return why all ranks refuse to train, in the same words."""
    size = qs.Mesh.parse(mesh).size
    (said,) = set(refusals(size, lambda transport: train_rank(transport, mesh, blocks, *given, **more)))
    assert said != "ran"
    return said


class Seeing(Mlp):
    """x + fc2(between(fc1(x))): what is between sees the scale of the inputs, the block's input, and an extra."""

    def __init__(self, between: Between, state: Tensor | None = None) -> None:
        super().__init__()
        self.norm, self.function = nn.Identity(), between
        if state is not None:
            self.register_buffer("kept", state.clone())
        self.count, self.config = 0, SimpleNamespace(hot=False)

    def between(self, y: Tensor) -> Tensor:
        return self.function(self, y)

    def forward(self, x: Tensor, extra: Any = None) -> Any:
        object.__setattr__(self, "given", x)
        object.__setattr__(self, "extra", extra)
        try:
            return super().forward(x)
        finally:
            del self.given, self.extra


def verdict(between: Between, mesh: str = "tp=2", state: Any = None, kind: Any = Seeing, **more: Any) -> str:
    """Return what is cut, or why not, of a block that trains at several scales; what runs has to be equal."""

    def block() -> nn.Module:
        return kind(between, state)

    more = {"evaluates": True} | more
    ranks = train(mesh, [block], SCALED, **more)
    require_equal(ranks, train("pp=1", [block], SCALED, **more)[0], 1e-8)
    return str(ranks[0].engine.tensor_cuts)
