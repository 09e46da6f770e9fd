"""Dependencies of updates, declared by optimizer classes; torch's own are in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from quintsched.errors import UsageError
from quintsched.runtime.optim.update_dependencies import COUPLING_BY_CLASS, Coupling, coupling_of, require_steppable

from .optimizers import LargestNorm, Lookahead, SignMomentum, Trust


def stand_ins() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(()).expand(64, 32)), nn.Parameter(torch.zeros(()).expand(64))]


class Renamed(torch.optim.AdamW):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)


class WithOwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class WithOwnGroups(torch.optim.SGD):
    def _init_group(self, *given: Any) -> Any:
        return super()._init_group(*given)  # type: ignore[misc]


class ClippingTrust(Trust):
    needs_gradient_norm = True


def said(needs_whole: bool) -> Callable[[Any], Optimizer]:
    def build(parameters: Any) -> Optimizer:
        made = WithOwnStep(parameters)
        made.needs_whole_parameters = needs_whole  # type: ignore[attr-defined]
        return made

    return build


CASES: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], Coupling | None]] = {
    "adamw": (torch.optim.AdamW, Coupling.NONE),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), Coupling.NONE),
    "capturable": (lambda p: torch.optim.AdamW(p, capturable=True), Coupling.NONE),
    "fused": (lambda p: torch.optim.SGD(p, fused=True), Coupling.NONE),
    "renamed": (Renamed, Coupling.NONE),
    "a subclass that makes state as it is built": (type("Ada", (torch.optim.Adagrad,), {}), Coupling.NONE),
    "an own step": (WithOwnStep, None),
    "an own method of its step": (WithOwnGroups, None),
    "adafactor": (torch.optim.Adafactor, Coupling.WITHIN),
    "muon": (lambda p: torch.optim.Muon(p[:1]), Coupling.WITHIN),
    "said no": (SignMomentum, Coupling.NONE),
    "said yes": (Trust, Coupling.WITHIN),
    "said of an instance": (said(True), Coupling.WITHIN),
    "said no of an instance": (said(False), Coupling.NONE),
    "said with the norm": (ClippingTrust, Coupling.WITHIN | Coupling.NORM),
    "not said": (LargestNorm, None),
    "wrapped": (lambda p: Lookahead(torch.optim.AdamW(p)), None),
}


@pytest.mark.parametrize("name", CASES)
def test_classes_say_what_updates_depend_on(name: str) -> None:
    build, expected = CASES[name]
    assert coupling_of(build(stand_ins())) == expected


def test_every_optimizer_of_torch_is_known_or_refused() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    others = {kind.__name__ for kind in kinds if kind not in COUPLING_BY_CLASS}
    assert others == {"Optimizer", "LBFGS", "SparseAdam"}


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
