"""Seq1F1B (Sun et al. 2024, arXiv:2406.03488): 1F1B over slices of the sequence, 1/q of a microbatch each.

    q=2, P=2, rank 0   F0 F1 F2 B1 F3 B0 F4 B3 F5 B2 …       microbatch 0 is the units 0 and 1
             rank 1    .. F0 F1 B1 F2 B0 F3 B3 F4 B2 …

A slice attends to earlier slices, so forwards run in sequence order and backwards in reverse: the gradient of a
slice's keys and values is complete only after the backwards of later slices. The last rank therefore runs all q
forwards of a microbatch before its first backward. Bubble and memory per rank shrink with q.
"""

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules.kit.registry import MAX_SLICES, Order, Shape, schedule


@schedule(
    "seq-1f1b",
    summary="1F1B over slices of the sequence",
    bubble="(P-1)(F+I+W)/q",
    memory="min((P-r-1)/q+1, M)",
    max_slices=MAX_SLICES,
)
def seq_1f1b(rank: int, shape: Shape) -> Order:
    """Yield 1F1B over units of (microbatch, slice); the backwards visit the slices of a microbatch in reverse."""
    units, slices = shape.num_units, shape.slices
    warmup = min(shape.pp - rank - 1 + slices - 1, units)
    for k in range(units + warmup):
        if k < units:
            yield Fwd(rank, k)
        if k >= warmup:
            microbatch, behind = divmod(k - warmup, slices)
            yield Bwd(rank, microbatch * slices + slices - 1 - behind)
