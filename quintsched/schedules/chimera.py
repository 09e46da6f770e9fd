"""Chimera (Li and Hoefler, SC'21): two pipelines of 1F1B in opposite directions fill each other's idle time.

Each rank holds a stage of both, and each takes half of the microbatches, P/2 in a round. With forwards and backwards of
one beat, P even, the two never want a rank at the same beat. The twins' gradients are summed by `SyncTied`.

beat     0  1  2  3  4  5  6  7  8  9        P=4: rank r holds stage r and, of the other pipeline, 4 + (3 - r)
rank 0   F0 .. F1 f2 b2 f3 b3 B0 .. B1       F, B: microbatches 0 and 1, down; f, b: 2 and 3, up
rank 3   f2 .. f3 F0 B0 F1 B1 b2 .. b3

A backward takes longer than a beat, so ranks then wait between rounds too. The bubble of a round is P-2 of the longer
one of forward and backward; that of 1F1B is P-1 of both.
"""

from quintsched.ir.instruction_set import Bwd, Compute, Fwd
from quintsched.schedules.kit.constraints import rounds_both_ways
from quintsched.schedules.kit.registry import Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import bidirectional


@schedule(
    "chimera",
    summary="two pipelines of 1F1B in opposite directions",
    bubble="(P-2)(max(F, I+W) + (M/P-1)|F-I-W|)",
    memory="P",
    placement=bidirectional,
    bidirectional=True,
    constraint=rounds_both_ways,
)
def chimera(rank: int, shape: Shape) -> Order:
    """Return the computations of both pipelines by their beats."""
    pp, half = shape.pp, shape.microbatches // 2
    found: list[tuple[int, Compute]] = []
    for stage in shape.stages_of(rank):
        way, place = divmod(stage, pp)
        for number in range(half):
            rounds, turn = divmod(number, pp // 2)
            beat, microbatch = 2 * (pp * rounds + turn), way * half + number
            found.append((beat + place, Fwd(stage, microbatch)))
            found.append((beat + 2 * pp - 1 - place, Bwd(stage, microbatch)))
    return [one for _, one in sorted(found, key=lambda beat: beat[0])]
