"""Gradients are taken in a bucket at a time: whatever user code does to `.grad`, none is lost or counted twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local
from tests.runtime.toys import sgd

WIDTHS = [8, 300]
"""Of buckets that begin at zero, and of larger ones, whose first gradient is copied."""
DTYPES = [torch.float32, torch.bfloat16]


class Clearing(nn.Linear):
    """A layer whose forward frees gradients, as a training loop does."""

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.grad = None
        return super().forward(x)


def engine_of(
    width: int, *, dtype: torch.dtype = torch.float32, kind: type[nn.Linear] = nn.Linear, **of: Any
) -> Engine:
    plan = qs.compile(**{"schedule": "1f1b", "mesh": "pp=1", "microbatches": 4} | of)
    blocks = [lambda: nn.Linear(8, width), lambda: kind(width, width), lambda: nn.Linear(width, 4)]
    return Engine(plan, blocks, F.mse_loss, sgd, dtype=dtype, seed=0)


def norms(engine: Engine, steps: int = 4, before: Callable[[int], object] = lambda step: None) -> list[float]:
    random = torch.Generator().manual_seed(0)
    dtype, found = next(engine.stages[0].parameters()).dtype, []
    for step in range(steps):
        before(step)
        inputs, targets = torch.randn(2, 8, 8, generator=random).to(dtype)
        found.append(engine.step(inputs, targets[:, :4]).grad_norm.item())
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("plan", [{}, {"schedule": "gpipe"}, {"schedule": "zb-h1"}], ids=str)
def test_gradients_that_a_forward_frees_are_kept(plan: dict[str, Any], width: int, dtype: torch.dtype) -> None:
    assert norms(engine_of(width, dtype=dtype, kind=Clearing, **plan)) == norms(engine_of(width, dtype=dtype, **plan))


def free(parameter: Tensor) -> None:
    parameter.grad = None


def clone(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("hook", "said"), [(free, "has lost its gradient"), (clone, "replaces its .grad")])
def test_a_hook_that_takes_a_sum_away_is_refused(hook: Callable[[Tensor], None], said: str, width: int) -> None:
    engine = engine_of(width)

    def hang_on(step: int) -> None:
        if step == 1:
            for parameter in engine.stages[0].parameters():
                parameter.register_post_accumulate_grad_hook(hook)

    with pytest.raises(MisfitError, match=said):
        norms(engine, before=hang_on)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_that_reads_weights_of_an_earlier_stage(dtype: torch.dtype, zero: int) -> None:
    """Their gradients come in the last stage's backward, and again in their own; under ZeRO their memory is freed."""

    def trained(chunks: int | None, zero: int = 0) -> list[float]:
        def rank(transport: Any) -> list[float]:
            schedule = "gpipe" if chunks is None else "interleaved-1f1b"
            plan = qs.compile(schedule, mesh="dp=2", microbatches=2, chunks=chunks, zero=zero)
            held: list[nn.Linear] = []

            def layer() -> nn.Module:
                held.append(nn.Linear(8, 8))
                return held[-1]

            def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
                biases = sum(layer.bias.float().square().sum() for layer in held[-4:])
                return (output - targets).float().square().sum() + 0.05 * len(output) * biases, float(len(output))

            engine = Engine(plan, [layer] * 4, loss, sgd, dtype=dtype, seed=0, transport=transport)
            inputs, targets = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(transport.rank)).to(dtype)
            return [engine.step(inputs, targets).loss.item() for _ in range(3)]

        return run_local(2, rank)[0]

    assert trained(2, zero) == pytest.approx(trained(None), rel=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("width", WIDTHS)
def test_weights_go_with_their_engine(width: int) -> None:
    engine = engine_of(width, schedule="zb-h1")
    norms(engine, steps=2)
    weights = [weakref.ref(parameter) for parameter in engine.stages[0].parameters()]
    engine.close()
    del engine
    gc.collect()
    assert not any(weight() is not None for weight in weights)
