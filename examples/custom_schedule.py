"""User-defined schedule: only the order in which one rank computes.

Here: 1F1B by pairs. While one microbatch of a pair computes, the messages of the other travel, at twice the
activations of 1F1B. Prove it for many shapes, then use it like any other:

    quintsched check examples/custom_schedule.py:paired_1f1b --pp 1..4 --microbatches 1..8
    quintsched compile --schedule examples/custom_schedule.py:paired_1f1b --mesh pp=4 --microbatches 8 -o plan.json
"""

import quintsched as qs
from quintsched.instructions import Bwd, Fwd
from quintsched.schedules import Order, Shape
from quintsched.simulation.time_grid import time_grid


def even(shape: Shape) -> str | None:
    """Say which shapes the schedule does not take, and which are near."""
    return f"microbatches={shape.microbatches} makes no pairs; add one" if shape.microbatches % 2 else None


@qs.schedule("paired-1f1b", summary="1F1B by pairs", bubble="(P-1)(F+I+W)", memory="min(2(P-r), M)", constraint=even)
def paired_1f1b(rank: int, shape: Shape) -> Order:
    """Yield a warm-up of pairs that fills the ranks after this one, then a pair forward, a pair back."""
    pairs = [(first, first + 1) for first in range(0, shape.microbatches, 2)]
    warmup = min(shape.pp - rank - 1, len(pairs))
    for k in range(len(pairs) + warmup):
        if k < len(pairs):
            yield from (Fwd(rank, microbatch) for microbatch in pairs[k])
        if k >= warmup:
            yield from (Bwd(rank, microbatch) for microbatch in pairs[k - warmup])


if __name__ == "__main__":
    simulation = qs.compile(paired_1f1b, mesh=qs.Mesh(pp=4), microbatches=8).simulate()
    print("\n".join(time_grid(simulation)), f"\nbubble {simulation.bubble:.1%}")
