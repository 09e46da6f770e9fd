"""Interleaved 1F1B (Narayanan et al., SC'21, arXiv:2104.04473): 1F1B with several stages on each rank.

Units of (chunk, microbatch) visit the chunks in groups of P microbatches, so that a rank has work of another chunk
while it waits:

    P=2, 2 chunks, rank 0 forwards:   chunk 0: mb 0, 1   chunk 1: mb 0, 1   chunk 0: mb 2, 3   chunk 1: …
"""

import numpy as np

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules.kit.constraints import whole_rounds
from quintsched.schedules.kit.registry import MAX_CHUNKS, Shape, schedule
from quintsched.schedules.kit.stage_placements import loop
from quintsched.schedules.kit.step_arrays import StepColumns, StepLane, alternate, rounds, side_by_side


@schedule(
    "interleaved-1f1b",
    summary="1F1B over several stages per rank",
    bubble="(P-1)(F+I+W)/v",
    memory="min((2(P-r-1)+(v-1)P+1)/v, M)",
    overlaps=True,
    placement=loop,
    min_chunks=2,
    max_chunks=MAX_CHUNKS,
    constraint=whole_rounds,
)
def interleaved_1f1b(rank: int, shape: Shape) -> StepColumns:
    """Return 1F1B over units of (chunk, microbatch); the backwards visit the chunks in reverse.

    With overlap the warm-up has one more unit, so that the two sides of an `Overlap` do not depend on each other.
    """
    stages = np.array(shape.stages_of(rank))
    units = shape.microbatches * shape.chunks
    warmup = min(2 * (shape.pp - rank - 1) + (shape.chunks - 1) * shape.pp + shape.overlap, units)
    chunk, microbatch = rounds(units, shape.pp, shape.chunks)
    forwards = StepLane(Fwd, 0, stages[chunk], microbatch)
    backwards = StepLane(Bwd, warmup, stages[::-1][chunk], microbatch)
    return side_by_side(forwards, backwards) if shape.overlap else alternate(forwards, backwards)
