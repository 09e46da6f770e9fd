"""Ranks whose blocks or losses have other code are refused by name, and those that read other values are told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport

from ..toys import sgd
from .refusals import refusals

mse = nn.functional.mse_loss
SCALE = 1.0


class Scaled(nn.Linear):
    scale = 1.0

    def __init__(self, factor: float = 1.0, activation: Any = torch.relu, bend: Any = None, rank: int = 0) -> None:
        super().__init__(4, 4)
        self.factor, self.activation, self.bend, self.rank = factor, activation, bend, rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor * SCALE


class Halved(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def differing(name: str) -> dict[str, Any]:
    """Return the definitions of a script with another number, or other code, on one rank, as its own module would."""
    made: dict[str, Any] = {"nn": nn, "Scaled": Scaled, "__name__": "script", "FACTOR": 1.0, "my_rank": 0}
    source = """
def twice(x): return x * NUMBER
class Block(Scaled):
    def forward(self, x):
        print("", end="" if my_rank else "")
        return twice(super().forward(x)) * FACTOR
def make(k):
    return lambda output, targets: nn.functional.mse_loss(output, targets) * k
"""
    exec(source.replace("NUMBER", "3" if name == "code" else "2"), made)
    made["FACTOR"] = 2.0 if name == "global" else 1.0
    made["my_rank"] = int(name == "rank")
    return made


ODD_BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attribute": (lambda: Scaled(2.0), 'block 0, itself, factor is "2.0" on rank 1, but "1.0"'),
    "function": (lambda: Scaled(activation=torch.tanh), "block 0, itself, activation"),
    "class": (lambda: Scaled(bend=nn.GELU), "block 0, itself, bend"),
    "rank": (lambda: Scaled(rank=1), ""),
}


def trained(transport: Transport, blocks: list[nn.Module], loss: Any = mse) -> None:
    Engine(qs.compile("1f1b", mesh="dp=3", microbatches=1), blocks, loss, sgd, transport=transport)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "do not have the same values" in record.getMessage()]


@pytest.mark.parametrize("odd", ODD_BLOCKS)
def test_attributes_that_differ_are_told_once(odd: str, caplog: pytest.LogCaptureFixture) -> None:
    make, named = ODD_BLOCKS[odd]
    bend = nn.ReLU if odd == "class" else None
    assert refusals(3, lambda t: trained(t, [make() if t.rank == 1 else Scaled(bend=bend)])) == ["ran"] * 3
    told = warnings(caplog)
    assert len(told) == (1 if named else 0)
    assert all("(rank 1 differs from the others)" in words and named in words for words in told)


@pytest.mark.parametrize(
    ("odd", "named"), [("global", "block 0, itself, FACTOR"), ("closure", "loss_fn, k"), ("rank", "")]
)
def test_values_that_code_reads_are_told(odd: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
    def run(transport: Transport) -> None:
        mine = differing(odd if transport.rank == 1 else "")
        trained(transport, [mine["Block"]()], mine["make"](2.0 if odd == "closure" and transport.rank == 1 else 1.0))

    assert refusals(3, run) == ["ran"] * 3
    told = warnings(caplog)
    assert len(told) == (1 if named else 0)
    assert all("(rank 1 differs from the others)" in words and named in words for words in told)


def test_other_code_is_refused() -> None:
    def run(transport: Transport) -> None:
        trained(transport, [differing("code" if transport.rank == 1 else "")["Block"]()])

    (words,) = set(refusals(3, run))
    assert "(rank 1 differs from the others): block 0, itself is" in words
    (words,) = set(refusals(3, lambda t: trained(t, [Halved() if t.rank == 1 else Scaled()])))
    assert 'block 0 is "Halved" on rank 1' in words
