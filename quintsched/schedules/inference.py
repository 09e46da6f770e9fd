"""Forward only, breadth first: each stage of a rank runs all microbatches before the next stage does.

rank 0  F0 F1 F2 F3 ..
rank 1  .. F0 F1 F2 F3
"""

from quintsched.ir.instruction_set import Fwd
from quintsched.schedules.kit.registry import MAX_CHUNKS, Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import loop


@schedule(
    "inference",
    summary="forward only, for validation and serving",
    bubble="((v-1)·max(P-M, 0)+P-1)·F/v",
    memory="0",
    mode="forward",
    placement=loop,
    max_chunks=MAX_CHUNKS,
    any_placement=True,
)
def inference(rank: int, shape: Shape) -> Order:
    """Yield the forwards of this rank, stage by stage."""
    for stage in shape.stages_of(rank):
        for microbatch in range(shape.microbatches):
            yield Fwd(stage, microbatch)
