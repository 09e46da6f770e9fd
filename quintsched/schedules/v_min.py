"""V-Min (Qi et al. 2024, arXiv:2405.15362): a third of 1F1B's memory, the minimum of a V shape.

Each microbatch goes down the ranks, up, down and up again without delay. The longer an activation is resident in one
chunk of a rank, the shorter it is in the other, and all ranks hold the same. The price is a bubble of about two thirds
of 1F1B's.

P=3    0  1  2  3  4  5  6  7  8  9  10 11 12 13       block of microbatch 0; one slot = a chunk's forward;
rank 0 f0             f1       i1             i0       the next block begins 6 slots later
rank 1    f0       f1             i1       i0
rank 2       f0 f1                   i1 i0
"""

from functools import lru_cache

from quintsched.ir.instruction_set import Compute
from quintsched.schedules.kit.building_blocks import PERIOD, PassSlots, repeat_and_close_up
from quintsched.schedules.kit.constraints import slot_by_slot
from quintsched.schedules.kit.registry import Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import v


@schedule(
    "v-min",
    summary="two chunks in a V, in a third of 1F1B's memory",
    bubble="max(0, 3P-1/2-3·⌊(P+4)/3⌋) in a span at F=I=W, M>=2P",
    memory="min(⌊(P+4)/3⌋, M)",
    placement=v,
    min_chunks=2,
    max_chunks=2,
    constraint=slot_by_slot,
)
def v_min(rank: int, shape: Shape) -> Order:
    """Yield this rank's part of the repeated block, with its gaps closed."""
    yield from _all_ranks(shape)[rank]


@lru_cache(maxsize=2)
def _all_ranks(shape: Shape) -> tuple[tuple[Compute, ...], ...]:
    blocks = [_block(rank, shape.pp) for rank in range(shape.pp)]
    tight = shape.pp % 3 == 1  # the blocks alone fill the memory, so no forward may go early
    return repeat_and_close_up(shape, blocks, cap=2 * ((shape.pp + 4) // 3), spare=int(tight))


def _block(rank: int, pp: int) -> PassSlots:
    turn = 2 * pp + (2 - 2 * pp) % PERIOD  # so that no two passes of a rank ever share a slot
    return rank, 2 * pp - 1 - rank, turn + rank, turn + 2 * pp - 1 - rank
