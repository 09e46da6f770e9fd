"""The figures of a step: added up in double precision, reduced once, and unknown until then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quintsched.runtime.comm import Transport, Work, run_local
from quintsched.runtime.interpreter.tally import Tally

CPU = torch.device("cpu")


def wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def reduced(transport: Transport) -> list[float]:
    """Return the sums of two ranks: a loss and a weight of one, twice those of the other."""
    tally = Tally(1, CPU)
    scale = transport.rank + 1.0
    tally.losses += [torch.tensor(0.5 * scale), torch.tensor(1.5 * scale, dtype=torch.float64)]
    tally.weights += [scale, 1]
    tally.metrics[0].append(torch.tensor(2 * scale, dtype=torch.bfloat16))
    tally.reduce(transport.make_group([(0, 1)]))
    assert tally.weight(wait_for) == 5
    return tally.sums.tolist()


def test_figures_are_summed_over_microbatches_and_ranks() -> None:
    assert run_local(2, reduced) == [[6.0, 5.0, 6.0]] * 2


def test_a_step_knows_no_sums_before_they_are_reduced() -> None:
    tally = Tally(2, CPU)
    assert tally.sums.isnan().all()
    assert tally.sums.shape == (4,)
    assert tally.weight(wait_for).isnan()


def test_a_rank_without_a_last_stage_brings_zeros() -> None:
    def run(transport: Transport) -> list[float]:
        tally = Tally(0, CPU)
        tally.reduce(transport.make_group([(0,)]))
        return tally.sums.tolist()

    assert run_local(1, run) == [[0.0, 0.0]]


@pytest.mark.parametrize("count", [300, 1000])
def test_short_types_are_added_up_in_double_precision(count: int) -> None:
    tally = Tally(0, CPU)
    tally.losses += [torch.ones((), dtype=torch.bfloat16)] * count

    def run(transport: Transport) -> float:
        tally.reduce(transport.make_group([(0,)]))
        return tally.sums[0].item()

    assert run_local(1, run) == [count]
