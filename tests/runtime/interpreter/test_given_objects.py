"""What a stage is given is a new object for each unit, though messages share buffers: code may go by objects."""

from copy import deepcopy

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine, run_local

given: dict[int, list[Tensor]] = {}
"""By stage: the masks that its block was given, kept, so that no number of an object comes twice."""


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Carry:
        return Carry(self.linear(x), mask=(x > 0).long())


class Middle(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear, self.stage = nn.Linear(3, 3), stage

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not x.is_meta:
            given.setdefault(self.stage, []).append(mask)
        return self.linear(x) * mask


def test_no_object_is_given_twice() -> None:
    plan, blocks = qs.compile("1f1b", mesh="pp=3", microbatches=4), [First(), Middle(1), Middle(2)]
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    given.clear()

    def train(transport: object) -> None:
        engine = Engine(plan, deepcopy(blocks), nn.functional.mse_loss, torch.optim.SGD, transport=transport)
        for _ in range(2):
            engine.step(x, y)
        engine.evaluate(x, y)

    run_local(3, train)
    assert len(given[2]) >= 4 * 3
    assert all(len({*map(id, masks)}) == len(masks) for masks in given.values())
