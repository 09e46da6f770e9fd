"""DualPipe (DeepSeek-V3, arXiv:2412.19437): microbatches enter at both ends, and each rank holds two stages' weights.

Half of the microbatches go down the ranks through stages 0, 1, …, the other half go up through the twins of these
stages; where they meet, the forward of one direction is paired with the backward of the other. `SyncTied` sums the
twins' gradients.

rank 0    F0 F1 F2 … ─▶  stages 0 1 2 3        P=4: rank r holds stage r, and 4 + (3 - r), the twin of 3 - r
rank 3    F4 F5 F6 … ─▶  stages 4 5 6 7        (its microbatches: the second half)

With each pair fused into one block F&B, the paper's idle time is (P/2-1)(F&B + B - 3W), B = I + W. In the plan the two
come one after the other, and it is (P/2-1)(F+I-W) where W <= I <= F <= I+W.
"""

from quintsched.schedules.kit.constraints import meets_half_way
from quintsched.schedules.kit.dual_phases import dual_phases
from quintsched.schedules.kit.orders_from_phases import StageLane, number
from quintsched.schedules.kit.registry import Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import bidirectional


@schedule(
    "dualpipe",
    summary="microbatches from both ends; each forward beside a backward",
    bubble="(P/2-1)(F+I-W) where W<=I<=F<=I+W",
    memory="P+1",
    overlaps=True,
    placement=bidirectional,
    bidirectional=True,
    constraint=meets_half_way,
)
def dualpipe(rank: int, shape: Shape) -> Order:
    """Yield the eight phases; lane 0 enters at the nearer end of the ranks, lane 1 at the farther."""
    half = shape.microbatches // 2
    down, up = shape.stages_of(rank)
    lanes = (StageLane(down, range(half)), StageLane(up, range(half, shape.microbatches)))
    phases = dual_phases(min(rank, shape.pp - 1 - rank), shape.pp // 2, half, overlap=shape.overlap)
    return number(phases, lanes if rank < shape.pp // 2 else lanes[::-1])
