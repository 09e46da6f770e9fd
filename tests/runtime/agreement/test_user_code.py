"""Ranks whose blocks or losses do something else, by their code or by values that it reads, are told so by name."""

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
from .test_agreement import mse, refusals

SCALE = 1.0
MAIN_RANK = 0


class Scaled(nn.Linear):
    scale = 1.0

    def __init__(self, factor: float = 1.0, activation: Any = torch.relu, bend: Any = None) -> None:
        super().__init__(4, 4)
        self.factor, self.activation, self.bend, self.rank = factor, activation, bend, MAIN_RANK

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor * SCALE


class Halved(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def differing(name: str) -> dict[str, Any]:
    """What a script defines that has another number, or code, on one rank: as its own module would."""
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
    "attribute": (lambda: Scaled(2.0), 'block 0, itself is "Scaled factor=2.0'),
    "function": (lambda: Scaled(activation=torch.tanh), "block 0, itself, reads activation"),
    "class": (lambda: Scaled(bend=nn.GELU), "block 0, itself, reads bend"),
    "method": (Halved, 'block 0 is "Halved"'),
}


@pytest.mark.parametrize("odd", ODD_BLOCKS)
def test_blocks_that_differ_by_what_they_do_are_named(odd: str) -> None:
    def run(transport: Transport) -> None:
        make, bend = ODD_BLOCKS[odd][0], nn.ReLU if odd == "class" else None
        blocks = [make() if transport.rank == 1 else Scaled(bend=bend)]
        Engine(qs.compile("1f1b", mesh="dp=3", microbatches=1), blocks, mse, sgd, transport=transport)

    (words,) = set(refusals(3, run))
    assert "(rank 1 differs from the others)" in words
    assert ODD_BLOCKS[odd][1] in words


@pytest.mark.parametrize(
    ("odd", "named"),
    [("code", "block 0, itself"), ("global", "reads FACTOR"), ("closure", "loss_fn, reads k"), ("rank", "")],
)
def test_code_that_differs_and_what_it_reads_are_named(odd: str, named: str) -> None:
    def run(transport: Transport) -> None:
        mine = differing(odd if transport.rank == 1 else "")
        loss = mine["make"](2.0 if odd == "closure" and transport.rank == 1 else 1.0)
        Engine(qs.compile("1f1b", mesh="dp=3", microbatches=1), [mine["Block"]()], loss, sgd, transport=transport)

    (words,) = set(refusals(3, run))
    assert named in words
    assert ("(rank 1 differs from the others)" in words) == bool(named)
