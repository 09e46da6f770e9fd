"""The figures of a step: added up in double precision, to the same bits in any order and place."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.interpreter.step_losses.loss_totals import Tally

CPU = torch.device("cpu")


def test_short_types_are_added_up_in_double_precision() -> None:
    count = 1000
    tally = Tally(0, count, 1, CPU)
    tally.losses += [(unit, torch.ones((), dtype=torch.bfloat16)) for unit in range(count)]

    def run(transport: Transport) -> float:
        tally.reduce(transport.make_group([(0,)]))
        return tally.figures.read_sums().sums[0].item()

    assert run_local(1, run) == [count]


def test_neither_order_nor_place_of_figures_changes_a_bit() -> None:
    """Losses of two pieces of the model, in any order, on one rank or on two."""
    random = torch.Generator().manual_seed(0)
    losses = [(place, x) for place, x in enumerate(torch.randn(40, generator=random, dtype=torch.float64))]

    def run(transport: Transport, size: int, order: int) -> tuple[float, ...]:
        tally = Tally(0, 20, 2, CPU)
        mine = [losses[k * 7 % 40] for k in range(40)][::order][transport.rank :: size]
        tally.auxiliary += mine
        tally.losses += [(place, x * 3) for place, x in mine if place < 20]
        tally.reduce(transport.make_group([tuple(range(size))]))
        return tuple(tally.figures.read_sums().sums.tolist())

    found: set[tuple[float, ...]] = set()
    for size, order in product((1, 2, 5), (1, -1)):
        found.update(run_local(size, partial(run, size=size, order=order)))
    assert len(found) == 1
