"""The figures of a step: added up in double precision, reduced once, and unknown until then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch

from quintsched.runtime.comm import Transport, Work, run_local
from quintsched.runtime.interpreter.step_losses.loss_totals import Tally
from quintsched.runtime.losses.weighted_losses import Counted

CPU = torch.device("cpu")


def wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def reduced(transport: Transport) -> list[float]:
    """Return the sums of two ranks: a loss and a weight of one, twice those of the other."""
    tally = Tally(1, 2, 1, CPU)
    scale = transport.rank + 1.0
    tally.losses += [(0, torch.tensor(0.5 * scale)), (1, torch.tensor(1.5 * scale, dtype=torch.float64))]
    tally.weights += [(0, scale), (1, 1)]
    tally.metrics[0].append((0, torch.tensor(2 * scale, dtype=torch.bfloat16)))
    tally.reduce(transport.make_group([(0, 1)]))
    assert tally.weight(wait_for) == 5
    return tally.figures.read_sums().sums[:3].tolist()


@pytest.mark.parametrize("count", [300, 1000])
def test_short_types_are_added_up_in_double_precision(count: int) -> None:
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


def test_figures_of_a_step_stay_when_the_next_one_has_the_same_table() -> None:
    def run(transport: Transport) -> list[list[float]]:
        tally, group, found = Tally(0, 2, 1, CPU, is_read=True), transport.make_group([(0,)]), []
        for step in range(3):
            tally.begin_step()
            for unit in range(2 - step % 2):
                tally.add_loss(unit, Counted(torch.tensor(0.1 + step + unit), 2.0, 3.0))
            tally.reduce(group)
            tally.weight(wait_for)
            found.append(tally.figures)
        assert found[0].table is found[2].table
        return [[*figures.read_sums().sums.tolist(), figures.rest[-1]] for figures in found]

    once = [torch.tensor(number) * 3.0 for number in (0.1, 1.1, 1.1, 2.1, 3.1)]
    a, b, c, d, e = [loss.item() for loss in once]
    assert run_local(1, run) == [[[a + b, 4.0, 2], [c, 2.0, 1], [d + e, 4.0, 2]]]
