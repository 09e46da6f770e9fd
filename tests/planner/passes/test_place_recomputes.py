"""Recomputation: where it stands, the memory and time that it takes, and schedules that place it themselves."""

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, Fwd, Recompute
from quintsched.schedules import Order, Schedule, Shape
from quintsched.simulation.time_grid import time_grid


def test_it_stands_right_before_its_backward_and_does_not_wait_for_the_gradient():
    simulation = qs.compile("1f1b", mesh="pp=3", microbatches=3, recompute=1).simulate()
    assert time_grid(simulation) == [
        "rank 0 F0  F1  F2  RF0 .   .   .   .   B0  -   RF1 .   B1  -   RF2 .   B2  -",
        "rank 1 .   F0  F1  RF0 .   .   B0  -   F2  RF1 B1  -   RF2 .   B2  -   .   .",
        "rank 2 .   .   F0  RF0 B0  -   F1  RF1 B1  -   F2  RF2 B2  -   .   .   .   .",
    ]


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_memory_falls(pp):
    """1F1B: what is in flight stands as checkpoints but for the one that is recomputed."""
    plan = qs.compile("1f1b", mesh=qs.Mesh(pp=pp), microbatches=2 * pp, recompute=1)
    costs = qs.Costs(activation=10.0, activation_checkpointed=1.0)
    assert plan.simulate(costs).peak_activations == tuple(pp - rank - 1 + 10.0 for rank in range(pp))
    assert max(plan.check().peak_activations) == 1.0, "by default a checkpoint holds nothing"


def test_a_schedule_that_places_it_wrongly_is_refused():
    def twice(rank: int, shape: Shape) -> Order:
        yield from (Fwd(rank, 0), Recompute(rank, 0), Recompute(rank, 0), Bwd(rank, 0))

    for recompute, words in ((1, "2 times instead of once"), (0, "2 times instead of never")):
        with pytest.raises(qs.UnsoundError, match=rf"rank 0 runs Recompute\(stage=0, microbatch=0\) {words}"):
            qs.compile(Schedule("twice", twice, "", "", ""), mesh="pp=1", microbatches=1, recompute=recompute)
