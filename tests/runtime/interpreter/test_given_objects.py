"""Inputs of a stage are new objects for each unit, though messages share buffers: code may depend on identity."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine, Transport, run_local

from ...helpers.training import train_alone, train_ranks

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


def test_a_hook_that_comes_later_is_given_new_objects_and_hooks_on_these_go_with_them() -> None:
    """Stages of torch alone are given the same leaves in each step, but where code of users sees them."""
    plan, blocks = qs.compile("1f1b", mesh="pp=2", microbatches=4), [nn.Linear(3, 3), nn.Linear(3, 3)]
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    gradients: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        if inputs[0].requires_grad:
            inputs[0].register_hook(gradients.append)

    def train(transport: Transport) -> list[float]:
        mine = deepcopy(blocks)
        engine = Engine(plan, mine, nn.functional.mse_loss, torch.optim.SGD, transport=transport)
        losses = [engine.step(x, y).loss.item() for _ in range(3)]
        if transport.rank == 1:
            handle = mine[1].register_forward_pre_hook(see)
        losses += [engine.step(x, y).loss.item() for _ in range(2)]
        if transport.rank == 1:
            handle.remove()
        return losses + [engine.step(x, y).loss.item() for _ in range(2)]

    found, _ = run_local(2, train)
    assert len({*map(id, seen)}) == len(seen) >= 2 * 4
    assert len(gradients) == 2 * 4
    expected = train_alone(nn.Sequential(*blocks), nn.functional.mse_loss, torch.optim.SGD, [(x, y)] * 7)
    assert found == pytest.approx(expected.losses, abs=1e-6)


class Bank(nn.Linear):
    """Attends to all inputs that it has had."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.cat([*self.bank, x.detach()])
        self.bank.append(x.detach())
        return super().forward(x) + torch.softmax(x @ keys.t(), -1) @ keys


def test_what_a_stage_keeps_of_its_input_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Bank()).double()
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    batches = [(x * step, y) for step in range(1, 5)]
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    found = train_ranks(plan, list(model), nn.functional.mse_loss, torch.optim.SGD, batches)
    alone = train_ranks(
        qs.compile("1f1b", mesh="dp=1", microbatches=2), list(model), nn.functional.mse_loss, torch.optim.SGD, batches
    )
    assert found[-1].losses == alone[0].losses
