"""Optimizers that clip by the norm of all gradients themselves, where ranks have some of the parameters."""

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


def gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Lamb(Optimizer):
    """You et al. 2020: Adam's update, as long as the parameter; gradients are clipped first."""

    needs_whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.01, clip: float | None = None) -> None:
        super().__init__(params, {"lr": lr})
        self.clip = clip
        self.needs_gradient_norm = clip is not None

    def norm(self) -> torch.Tensor:
        return torch.stack([p.grad.norm() for p in gradients(self)]).norm()  # type: ignore[union-attr]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        divisor = 1.0 if self.clip is None else float(torch.clamp(self.norm() / self.clip, min=1.0))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad / divisor
                first = state.setdefault("first", torch.zeros_like(p)).lerp_(gradient, 0.1)
                second = state.setdefault("second", torch.zeros_like(p)).lerp_(gradient.square(), 0.01)
                update = first / (second.sqrt() + 1e-6) + 0.1 * p
                trust = p.norm() / update.norm()
                p.add_(update * torch.where(trust > 0, trust, 1.0), alpha=-group["lr"])


class Lars(Lamb):
    """You et al. 2017: momentum, in proportion to the parameter's norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        divisor = 1.0 if self.clip is None else float(torch.clamp(self.norm() / self.clip, min=1.0))
        for p in gradients(self):
            update = p.grad / divisor + 0.01 * p  # type: ignore[operator]
            trust = (p.norm() + 0.1) / (update.norm() + 0.1)
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(update * trust)
            p.add_(momentum, alpha=-0.05)


class ClippingAdamW(torch.optim.AdamW):
    needs_whole_parameters, needs_gradient_norm = False, True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(gradients(self), 0.1)
        super().step(closure)


def _clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(gradients(optimizer), 0.1)


def hooked(parameters: Any) -> Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    made.register_step_pre_hook(_clip)
    made.needs_whole_parameters, made.needs_gradient_norm = False, True  # type: ignore[attr-defined]
    return made


BUILDS: dict[str, Callable[[Any], Optimizer]] = {
    "lamb": Lamb,
    "lamb that clips": partial(Lamb, clip=0.3),
    "lars": Lars,
    "lars that clips": partial(Lars, clip=0.3),
    "AdamW that clips": ClippingAdamW,
    "a hook that clips": hooked,
}
PLANS = [("dp=2", 1), ("dp=2", 2), ("dp=2", 3), ("pp=2", 0), ("tp=2", 0), ("dp=2,pp=2", 3), ("tp=2,pp=2", 0)]


def blocks() -> Blocks:
    return tiny_gpt(LENGTH, depth=2)


@cache
def alone(name: str, clip: float | None = None) -> Outcome:
    return train_plainly(ids_task(3, SAMPLES, LENGTH), blocks(), 4, BUILDS[name], clip, torch.float64)


def require_equality(name: str, plan: qs.Plan, clip: float | None = None, build: Any = None) -> None:
    task = ids_task(3, SAMPLES, LENGTH)
    found = train_on(plan, task, blocks(), build or BUILDS[name], clip, 0.004, torch.float64)
    assert worst_difference(found, alone(name, clip)) <= 1e-9


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("mesh", "zero"), PLANS)
@pytest.mark.parametrize("name", BUILDS)
def test_own_norms_equal_one_process(name: str, mesh: str, zero: int) -> None:
    require_equality(name, qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero))


@pytest.mark.slow
def test_the_norm_is_that_of_gradients_that_the_engine_has_clipped() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    require_equality("lamb that clips", plan, clip=0.35)


def test_norms_of_some_parameters_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    words = r"depends on all parameters, .* let the engine clip \(clip=…\)"

    def build(p: Any) -> list[Optimizer]:
        return [ClippingAdamW([x for x in p if x.dim() > 1]), torch.optim.SGD([x for x in p if x.dim() < 2])]

    with pytest.raises(MisfitError, match=words):
        require_equality("lamb", plan, build=build)


def test_hooks_with_parameters_of_their_own_are_refused() -> None:
    def build(parameters: Any) -> Optimizer:
        some = list(parameters)
        made = torch.optim.SGD(some, lr=0.1)
        made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(some, 0.1) and None)
        return made

    with pytest.raises(UsageError, match=r"a step hook of SGD has parameters .* lambda optimizer, args, kwargs"):
        require_equality("lamb", qs.compile("1f1b", mesh="pp=2", microbatches=2), build=build)
