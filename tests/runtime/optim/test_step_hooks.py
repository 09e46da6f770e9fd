"""Step hooks: optimizers say what these depend on, or are given all parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.blocks.block_outlines import Blocks

from ..toys import Outcome, ids_task, tiny_gpt, train_on, train_plainly, worst_difference

LENGTH, SAMPLES = 8, 8
Hook = Callable[[Optimizer, Any, Any], None]


def gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def scaling(factors: Callable[[list[torch.Tensor]], list[float]]) -> Hook:
    """Return a hook that scales each of the gradients by a number."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = gradients(optimizer)
        for gradient, factor in zip(found, factors(found), strict=True):
            gradient.mul_(factor)

    return hook


def hooked(hook: Callable[[], Hook], kind: Any = torch.optim.SGD, **said: bool) -> Callable[[Any], Optimizer]:
    def build(parameters: Any) -> Optimizer:
        made: Optimizer = kind(parameters, lr=0.1)
        made.register_step_pre_hook(hook())
        vars(made).update(said)
        return made

    return build


def warming_up() -> Hook:
    steps = 0

    def factors(found: list[torch.Tensor]) -> list[float]:
        nonlocal steps
        steps += 1
        return [min(1.0, steps / 3)] * len(found)

    return scaling(factors)


def clipping_by_history() -> Hook:
    norms: list[float] = []

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients(optimizer)]).norm()))
        for gradient in gradients(optimizer):
            gradient.mul_(min(1.0, float(torch.tensor(norms).quantile(0.3)) / norms[-1]))

    return hook


def clipping_values() -> Hook:
    return lambda optimizer, args, kwargs: nn.utils.clip_grad_value_(
        [p for group in optimizer.param_groups for p in group["params"]], 0.01
    )


EACH, NORM = {"needs_whole_parameters": False}, {"needs_whole_parameters": False, "needs_gradient_norm": True}
BUILDS = {
    "a counter": hooked(warming_up, **EACH),
    "a history": hooked(clipping_by_history, **NORM),
    "on one that makes state as it is built": hooked(clipping_values, partial(torch.optim.Adagrad, eps=1e-3), **EACH),
    "said nothing of, by places": hooked(lambda: scaling(lambda found: [0.8**n for n in range(len(found))])),
}


def blocks() -> Blocks:
    return tiny_gpt(LENGTH, depth=2)


@cache
def alone(name: str) -> Outcome:
    return train_plainly(ids_task(3, SAMPLES, LENGTH), blocks(), 4, BUILDS[name], dtype=torch.float64)


def train(plan: qs.Plan, build: Any) -> list[Outcome]:
    return train_on(plan, ids_task(3, SAMPLES, LENGTH), blocks(), build, dtype=torch.float64, bucket_mb=0.004)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 1), ("dp=2", 3), ("pp=2", 0), ("tp=2", 0)])
@pytest.mark.parametrize("name", BUILDS)
def test_hooks_equal_one_process(name: str, mesh: str, zero: int) -> None:
    if name.startswith("said nothing") and not zero:
        words = "SGD with its step hooks does not say what .* write optimizer.needs_whole_parameters = False where"
        with pytest.raises(MisfitError, match=words):
            train(qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero), BUILDS[name])
        return
    found = train(qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero), BUILDS[name])
    assert worst_difference(found, alone(name)) <= 1e-9


def test_hooks_that_name_a_global_module_are_refused() -> None:
    with pytest.raises(UsageError, match="a step hook of SGD has parameters or modules by itself"):
        train(qs.compile("1f1b", mesh="pp=2", microbatches=2), hooked(lambda: by_a_global))


MODEL = nn.Linear(2, 2)


def by_a_global(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)
