"""ZBV (Qi et al. 2024, arXiv:2405.15362, and the zero-bubble code): a V without idle time, in the memory of 1F1B.

The stages go down the ranks and up again, so rank 0 has the first and the last: its first backward comes early, and
the forwards of both chunks fill the short time until then.

rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 …             P=2: rank 0 has stages 0 and 3, rank 1 has 1, 2
rank 1  ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 …

No rank is idle within its span if F = I = W and M >= 2P-1; each rank begins one chunk's forward after the previous
one. If I >= F >= W, the longest span is (P-1)(I-W) beyond M(F+I+W).
"""

from collections.abc import Iterator

from quintsched.schedules.kit.orders_from_phases import Phase, StageLane, Turn, number
from quintsched.schedules.kit.registry import Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import v

F0, F1, I0, I1, W = Turn.F0, Turn.F1, Turn.I0, Turn.I1, Turn.W


@schedule(
    "zbv",
    summary="two chunks in a V, split backwards: no idle time in a rank's span",
    bubble="(P-1)(I-W) in a span where I>=F>=W, M>=2P-1",
    memory="min(P, M)",
    placement=v,
    min_chunks=2,
    max_chunks=2,
)
def zbv(rank: int, shape: Shape) -> Order:
    """Yield the phases of this rank, each stage's microbatches in order."""
    down, up = shape.stages_of(rank)
    microbatches = range(shape.microbatches)
    phases = _phases(rank, shape.pp, max(shape.microbatches, 2 * shape.pp - 1))
    return number(phases, (StageLane(down, microbatches), StageLane(up, microbatches)))


def _phases(rank: int, pp: int, microbatches: int) -> Iterator[Phase]:
    """Yield fill, steady state and drain, for at least 2 pp - 1 microbatches."""
    behind = pp - rank
    yield (F0,), 2 * behind - 1
    yield (F1, F0), rank
    yield (F1, I1, W), behind
    forwards = 2 * behind - 1 + rank
    yield (F0, I0, W, F1, I1, W), microbatches - forwards
    yield (I0, W, F1, I1, W), forwards - pp
    yield (I0, I1), rank
    yield (I0, W), behind
    yield (W,), 2 * rank
