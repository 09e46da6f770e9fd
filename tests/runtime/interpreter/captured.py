"""Steps from graphs on a CPU, those of `op_tape`: engines that have them, beside the same without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quintsched as qs
from quintsched.runtime import plan_requirements
from quintsched.runtime.engine import Engine
from quintsched.runtime.interpreter import cuda_graphs
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum
from tests.runtime.toys import ids_task, sgd, tiny_gpt

from .op_tape import OpTape

STEPS, SAMPLES, LENGTH = 8, 8, 8
Step = Callable[[Engine, int, Tensor, Tensor], Any]


def tapes(monkeypatch: pytest.MonkeyPatch) -> list[OpTape]:
    """Let the CPU have graphs; returns those that are made."""
    made: list[OpTape] = []

    def new() -> OpTape:
        made.append(OpTape())
        return made[-1]

    for module in (plan_requirements, cuda_graphs):
        monkeypatch.setattr(module, "graphs_of", lambda device: new)
    return made


def plainly(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
    return engine.step(inputs, targets)


def engine_of(plan: qs.Plan | None = None, blocks: Any = None, loss_fn: Any = cross_entropy_sum, **more: Any) -> Engine:
    plan = plan or qs.compile("1f1b", mesh="pp=1", microbatches=4)
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "optimizer": sgd, "metrics": {"right": correct_sum}} | more
    return Engine(plan, blocks or tiny_gpt(LENGTH, depth=2), loss_fn, **options)


def trained(engine: Engine, step: Step = plainly, steps: int = STEPS) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return each step's figures, read when all are done, and weights and buffers after the last."""
    results = [step(engine, number, *batch) for number, batch in enumerate(ids_task(steps, SAMPLES, LENGTH).batches)]
    figures = [torch.stack([r.loss, r.grad_norm, *r.metrics.values(), torch.tensor(r.skipped)]) for r in results]
    return figures, {name: weight.clone() for name, weight in engine.full_weights().items()}


def require_same(make: Callable[..., Engine], step: Step = plainly, steps: int = STEPS) -> list[Engine]:
    """Raise unless steps from graphs have the bits of steps by instructions; returns both engines, trained."""
    engines = [make(cuda_graph=is_captured) for is_captured in (True, False)]
    (figures, weights), (expected, others) = (trained(engine, step, steps) for engine in engines)
    torch.testing.assert_close((figures, weights), (expected, others), rtol=0, atol=0, equal_nan=True)
    return engines


def with_block(block: Any) -> list[Any]:
    blocks = tiny_gpt(LENGTH, depth=2)
    return [*blocks[:2], block, *blocks[2:]]
