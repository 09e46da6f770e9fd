"""Schedules found by list scheduling: whenever a rank is free, it does what can run and comes first by a priority.

python examples/list_schedule.py
quintsched check examples/list_schedule.py:greedy_v --pp 1..4 --microbatches 1..8
"""

import quintsched as qs
from quintsched.instructions import Compute, Fwd
from quintsched.schedules import Order, Shape
from quintsched.schedules.kit import HALVES, list_schedule, v


@qs.schedule("greedy-1f1b", summary="1F1B, found by its memory alone", memory="min(P-r, M)")
def greedy_1f1b(rank: int, shape: Shape) -> Order:
    """Do backwards first, within the memory of 1F1B."""
    return list_schedule(shape, memory_cap=lambda rank: shape.pp - rank)[rank]


@qs.schedule("greedy-v", summary="a V in the memory of 1F1B", placement=v, min_chunks=2, max_chunks=2)
def greedy_v(rank: int, shape: Shape) -> Order:
    """Do backwards in halves first, within the memory of 1F1B on all ranks."""
    return list_schedule(shape, passes=HALVES, memory_cap=shape.pp)[rank]


def forwards_first(computation: Compute) -> tuple[bool, int]:
    """Prefer forwards, as GPipe does."""
    return not isinstance(computation, Fwd), computation.microbatch


@qs.schedule("greedy-gpipe", summary="GPipe, found by its priority", memory="M")
def greedy_gpipe(rank: int, shape: Shape) -> Order:
    """Do forwards first."""
    return list_schedule(shape, forwards_first)[rank]


if __name__ == "__main__":
    for schedule in (greedy_1f1b, greedy_v, greedy_gpipe):
        print(qs.compile(schedule, mesh="pp=4", microbatches=8).simulate())
