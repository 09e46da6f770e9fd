"""Orders in a V for any memory: blocks of one microbatch that are repeated and closed up (Qi et al. 2024).

A microbatch goes down the ranks, up, down and up again. On each of these four ways the slots from one rank to the next
alternate between two numbers; the more slots, the longer its activations live:

    P=4    0  1  2  3  4  5  6  7  8        down (1, 3), up (1, 3): rank 1 starts 1 slot after rank 0, rank 2 starts 3
    rank 0 f0                                after rank 1, and so on
    rank 1    f0
    rank 2             f0 .  .  f1
    rank 3                f0 f1

V-Min and V-Half are two of these blocks, each for one size of memory. All blocks in which no two passes of a rank
share a slot are tried with few microbatches; the best ones give the orders of all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, cycle, islice, product

from quintsched.ir.instruction_set import Compute
from quintsched.schedules import Shape
from quintsched.schedules.kit.building_blocks import PERIOD, PassSlots, repeat_and_close_up

Way = tuple[int, int]
"""Slots from one rank to the next, which alternate."""
WAYS: tuple[Way, ...] = tuple(product((1, 2, 3), (1, 2, 3)))


def v_blocks(pp: int) -> Iterator[list[PassSlots]]:
    """Yield all blocks, in which a rank's passes are in different slots of the period."""
    for down, up in product(WAYS, repeat=2):
        first, second = _slots(0, pp, down), _slots(0, pp, up)[::-1]
        second = [slot + first[-1] + 1 for slot in second]
        if not _are_apart(first, second):
            continue
        for turn, down_again in product(range(1, PERIOD + 1), WAYS):
            third = _slots(second[0] + turn, pp, down_again)
            if not _are_apart(first, second, third):
                continue
            for up_again in WAYS:
                fourth = _slots(third[-1] + 1, pp, up_again)[::-1]
                if _are_apart(first, second, third, fourth):
                    yield list(zip(first, second, third, fourth, strict=True))


def v_block_orders(shape: Shape, chunks: int, block: list[PassSlots]) -> list[tuple[Compute, ...]] | None:
    """Return the orders of all ranks, none of which holds more than `chunks` chunks; None if memory runs out."""
    orders = repeat_and_close_up(shape, block, chunks)
    return list(orders) if all(len(order) == PERIOD * shape.microbatches for order in orders) else None


def _slots(first: int, pp: int, way: Way) -> list[int]:
    """Return the slot of each rank, from the one that starts first."""
    return [*accumulate(islice(cycle(way), pp - 1), initial=first)]


def _are_apart(*ways: list[int]) -> bool:
    """Return whether the passes of each rank are in different slots of the period."""
    return all(len({slot % PERIOD for slot in passes}) == len(ways) for passes in zip(*ways, strict=True))
