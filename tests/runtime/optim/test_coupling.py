"""What updates depend on is found by trying, whatever an optimizer's name, sizes and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from quintsched.errors import CodeError, UsageError
from quintsched.runtime.optim.coupling import Coupling, coupling_of, require_steppable

from .optimizers import GlobalNorm, LargestNorm, Lookahead, Shampoo, SignMomentum, Trust

CPU = torch.device("cpu")


def stand_ins() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(()).expand(64, 32)), nn.Parameter(torch.zeros(()).expand(64))]


class Noisy(Trust):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(p.grad + torch.randn_like(p), alpha=-0.1)


class Broken(Trust):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no such device")


class Flaky(SignMomentum):
    """Raises in the second of all steps, and never again."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        Flaky.steps += 1
        if Flaky.steps == 2:
            raise OSError("a file was away")
        super().step()


class Narrow(SignMomentum):
    """Steps no float64."""

    def step(self, closure: Any = None) -> None:
        if any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"]):
            raise TypeError("no kernel for float64")
        super().step()


class Said(Broken):
    needs_whole_parameters = True


class Late(SignMomentum):
    """Begins to look at whole matrices in its eleventh step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            if self.state[p]["steps"] > 10:
                p.div_(1 + 0.01 * p.norm())


class Renamed(torch.optim.AdamW):
    pass


class Wrapper(Optimizer):
    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


CASES: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], Coupling]] = {
    "adamw": (torch.optim.AdamW, Coupling.NONE),
    "renamed": (Renamed, Coupling.NONE),
    "renamed, without a learning rate yet": (lambda p: Renamed(p, lr=0.0), Coupling.NONE),
    "a subclass that makes state as it is built": (type("Ada", (torch.optim.Adagrad,), {}), Coupling.NONE),
    "sign momentum": (SignMomentum, Coupling.NONE),
    "narrow": (Narrow, Coupling.NONE),
    "late": (Late, Coupling.WITHIN),
    "trust": (Trust, Coupling.WITHIN),
    "shampoo": (Shampoo, Coupling.WITHIN),
    "adafactor": (torch.optim.Adafactor, Coupling.WITHIN),
    "muon": (lambda p: torch.optim.Muon(p[:1]), Coupling.WITHIN),
    "global norm": (GlobalNorm, Coupling.NORM),
    "largest norm": (LargestNorm, Coupling.ACROSS),
    "wrapped": (lambda p: Wrapper(torch.optim.AdamW(p)), Coupling.NONE),
    "wrapped norm": (lambda p: Wrapper(GlobalNorm(p)), Coupling.NORM),
    "said": (Said, Coupling.WITHIN),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_what_updates_depend_on_is_found(name: str) -> None:
    build, expected = CASES[name]
    before = torch.get_rng_state()
    assert coupling_of(build(stand_ins()), CPU) is expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Noisy, "Noisy draws random numbers"),
        (Broken, r"Broken depends on could not be tried .* Broken\.needs_whole_parameters = True"),
        (lambda p: Lookahead(torch.optim.AdamW(p)), r"Lookahead\.needs_whole_parameters"),
    ],
)
def test_what_cannot_be_found_is_asked_for(build: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        coupling_of(build(stand_ins()), CPU)


def test_closures_and_sparse_gradients_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]

    class Searching(Trust):
        def step(self, closure: Any) -> None: ...  # type: ignore[override]

    for optimizer, words in (
        (torch.optim.LBFGS(parameters), "LBFGS computes losses inside its step"),
        (Searching(parameters), "Searching computes losses"),
        (torch.optim.SparseAdam(parameters), "SparseAdam wants sparse gradients"),
    ):
        with pytest.raises(UsageError, match=words):
            require_steppable(optimizer)


def test_an_error_of_the_optimizer_that_does_not_come_again_is_raised_as_its_own() -> None:
    with pytest.raises(CodeError, match="Flaky, raised OSError: a file was away") as raised:
        coupling_of(Flaky(stand_ins()), CPU)
    assert isinstance(raised.value.__cause__, OSError)
