"""Eager 1F1B (Zhuang et al. 2022, arXiv:2211.05322): 1F1B that runs ahead, so that messages have time to travel.

rank 0  F0 F1 F2 .. B0 .... F3 B1 .... .. B2 ....       per rank after it, a rank is two forwards ahead, not one
rank 1  .. F0 B0 .... F1 B1 .... F2 B2 .... F3 B3

So while an activation and its gradient travel to the next rank and back, a rank has another forward and backward to
do: messages that take up to (F+I+W)/2 each cost 2(P-1) of their time in all, not some for each microbatch. The bubble
besides is that of 1F1B, (P-1)(F+I+W); 2(P-r)-1 activations stand on rank r instead of P-r.
"""

from quintsched.ir.instructions import Bwd, Fwd
from quintsched.schedules.kit.registry import Order, Shape, schedule


@schedule(
    "eager-1f1b",
    summary="1F1B with twice the warm-up, which hides messages",
    bubble="(P-1)(F+I+W)",
    memory="min(2(P-r)-1, M)",
)
def eager_1f1b(rank: int, shape: Shape) -> Order:
    """Yield a warm-up of two forwards per rank after this one, then pairs, then the backwards that are left."""
    warmup = min(2 * (shape.pp - rank - 1), shape.microbatches)
    for microbatch in range(warmup):
        yield Fwd(rank, microbatch)
    for microbatch in range(warmup, shape.microbatches):
        yield Fwd(rank, microbatch)
        yield Bwd(rank, microbatch - warmup)
    for microbatch in range(shape.microbatches - warmup, shape.microbatches):
        yield Bwd(rank, microbatch)
