"""Interleaved zero bubble: ZB-H1 (Qi et al. 2023, arXiv:2401.10241) over several stages on each rank.

P=2, 2 chunks (f, i, w: the second one)
rank 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 …
rank 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 …       weight halves are `rank` units late

Units visit the chunks in groups of P microbatches, as in interleaved 1F1B, but a rank is only one unit ahead per later
rank. The makespan is M(F+I+W) + (P-1)(F+I-min(F,I,W))/v, and each rank holds the activations of P microbatches.
"""

import numpy as np

from quintsched.ir.instruction_set import BwdInput, BwdWeight, Fwd
from quintsched.schedules.kit.constraints import whole_rounds
from quintsched.schedules.kit.registry import MAX_CHUNKS, Shape, schedule
from quintsched.schedules.kit.stage_placements import loop
from quintsched.schedules.kit.step_arrays import StepColumns, StepLane, alternate, rounds


@schedule(
    "interleaved-zb",
    summary="ZB-H1 over several stages per rank",
    bubble="(P-1)(F+I-min(F,I,W))/v",
    memory="P",
    placement=loop,
    min_chunks=2,
    max_chunks=MAX_CHUNKS,
    constraint=whole_rounds,
)
def interleaved_zb(rank: int, shape: Shape) -> StepColumns:
    """Return split 1F1B over units of (chunk, microbatch); the backwards visit the chunks in reverse."""
    stages = np.array(shape.stages_of(rank))
    warmup, late = (shape.chunks - 1) * shape.pp + shape.pp - rank - 1, rank
    chunk, microbatch = rounds(shape.microbatches * shape.chunks, shape.pp, shape.chunks)
    return alternate(
        StepLane(Fwd, 0, stages[chunk], microbatch),
        StepLane(BwdInput, warmup, stages[::-1][chunk], microbatch),
        StepLane(BwdWeight, warmup + late, stages[::-1][chunk], microbatch),
    )
