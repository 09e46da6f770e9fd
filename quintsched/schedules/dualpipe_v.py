"""DualPipeV (DeepSeek 2025, github.com/deepseek-ai/DualPipe): DualPipe cut in half and folded into a V.

The stages go down the ranks and up again, so that one model's two chunks take the place of DualPipe's two copies: the
weights are held once. In the steady state the forward of one chunk is paired with the backward of the other:

rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1) (3F2 0B0) …             P=2: rank 0 has stages 0 and 3, rank 1 has 1, 2
rank 1  ... 1F0 2F0 1F1 2F1 (1F2 2B0) (2F2 1B0) (1F3 2B1) …

Beyond M(F+I+W), this takes (P-1)(F+I-W)/2 where W <= I <= F <= I+W and M >= 2P; each rank holds the activations of P
microbatches and one chunk. Fewer than 2P microbatches run in the same order, with more idle time.
"""

from quintsched.schedules.kit.dual_phases import dual_phases
from quintsched.schedules.kit.orders_from_phases import StageLane, number
from quintsched.schedules.kit.registry import Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import v


@schedule(
    "dualpipe-v",
    aliases=("dualpipev",),
    summary="two chunks in a V; each forward beside a backward",
    bubble="(P-1)(F+I-W)/2 where W<=I<=F<=I+W, M>=2P",
    memory="min(P+1/2, M)",
    overlaps=True,
    placement=v,
    min_chunks=2,
    max_chunks=2,
)
def dualpipe_v(rank: int, shape: Shape) -> Order:
    """Yield the eight phases; lane 0 is the chunk on the way down, lane 1 the chunk on the way up."""
    down, up = shape.stages_of(rank)
    microbatches = range(shape.microbatches)
    phases = dual_phases(rank, shape.pp, max(shape.microbatches, 2 * shape.pp), overlap=shape.overlap)
    return number(phases, (StageLane(down, microbatches), StageLane(up, microbatches)))
