"""V-Half (Qi et al. 2024, arXiv:2405.15362): half of 1F1B's memory, and half of its idle time.

The stages go down the ranks and up again. On the way down a microbatch takes two slots per rank, on the way up one: the
longer an activation is resident in one chunk of a rank, the shorter it is in the other, and all ranks hold the same.

P=3    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16    block of microbatch 0; one slot = a chunk's forward;
rank 0 f0                   f1 i1                      i0    the next block begins 6 slots later
rank 1       f0          f1          i1             i0
rank 2             f0 f1                   i1    i0
"""

from functools import lru_cache

from quintsched.ir.instruction_set import Compute
from quintsched.schedules.kit.building_blocks import PassSlots, repeat_and_close_up
from quintsched.schedules.kit.constraints import slot_by_slot
from quintsched.schedules.kit.registry import Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import v


@schedule(
    "v-half",
    summary="two chunks in a V, in half of 1F1B's memory",
    bubble="max(0, 3P-1/2-3·⌊(P+2)/2⌋) in a span at F=I=W, M>=2P",
    memory="min(⌊(P+2)/2⌋, M)",
    placement=v,
    min_chunks=2,
    max_chunks=2,
    constraint=slot_by_slot,
)
def v_half(rank: int, shape: Shape) -> Order:
    """Yield this rank's part of the repeated block, with its gaps closed."""
    yield from _all_ranks(shape)[rank]


@lru_cache(maxsize=2)
def _all_ranks(shape: Shape) -> tuple[tuple[Compute, ...], ...]:
    blocks = [_block(rank, shape.pp) for rank in range(shape.pp)]
    return repeat_and_close_up(shape, blocks, cap=2 * ((shape.pp + 2) // 2))


def _block(rank: int, pp: int) -> PassSlots:
    turn = 3 * pp - 1 + (3 if pp % 2 == 0 else 0)  # so that no two passes of a rank ever share a slot
    return 2 * rank, 3 * pp - 2 - rank, turn + 2 * rank, turn + 3 * pp - 1 - rank
