"""Looped breadth first (Lamy-Poirier 2022, arXiv:2211.05953): GPipe with several stages on each rank.

P=2, 2 chunks (f, b: the second one)
rank 0  F0 F1 F2 f0 f1 f2 .. .. .. b0 b1 b2 B0 B1 B2       b, B: twice as long
rank 1  .. F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2

All microbatches pass a stage before the next one starts, so its gradients can be reduced over the replicas while the
next stage computes. The bubble is 1/v of GPipe's, larger if M < P: each chunk then waits for the first microbatch.
"""

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules.kit.registry import MAX_CHUNKS, Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import loop


@schedule(
    "bfs",
    summary="looped breadth first: chunk by chunk, all microbatches of each",
    bubble="((v-1)·max(P-M, 0)+P-1)(F+I+W)/v",
    memory="M",
    placement=loop,
    min_chunks=2,
    max_chunks=MAX_CHUNKS,
    any_placement=True,
)
def bfs(rank: int, shape: Shape) -> Order:
    """Yield the forwards of this rank, stage by stage, and then the backwards from the last stage to the first."""
    stages = shape.stages_of(rank)
    for stage in stages:
        for microbatch in range(shape.microbatches):
            yield Fwd(stage, microbatch)
    for stage in reversed(stages):
        for microbatch in range(shape.microbatches):
            yield Bwd(stage, microbatch)
