"""Eager 1F1B (Zhuang et al. 2022, arXiv:2211.05322): 1F1B with a longer warm-up that hides message latency.

rank 0  F0 F1 F2 .. B0 .... F3 B1 .... .. B2 ....       two forwards ahead per later rank, not one
rank 1  .. F0 B0 .... F1 B1 .... F2 B2 .... F3 B3

While an activation and its gradient travel to the next rank and back, a rank has another forward and backward to
compute: messages of up to (F+I+W)/2 each then cost 2(P-1) of their time in all, not a cost per microbatch. The bubble
itself is that of 1F1B, (P-1)(F+I+W); rank r holds 2(P-r)-1 activations instead of P-r.
"""

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules.kit.registry import Order, Shape, schedule


@schedule(
    "eager-1f1b",
    summary="1F1B with twice the warm-up, which hides messages",
    bubble="(P-1)(F+I+W)",
    memory="min(2(P-r)-1, M)",
)
def eager_1f1b(rank: int, shape: Shape) -> Order:
    """Yield a warm-up of two forwards per later rank, then forward-backward pairs, then the remaining backwards."""
    warmup = min(2 * (shape.pp - rank - 1), shape.microbatches)
    for microbatch in range(warmup):
        yield Fwd(rank, microbatch)
    for microbatch in range(warmup, shape.microbatches):
        yield Fwd(rank, microbatch)
        yield Bwd(rank, microbatch - warmup)
    for microbatch in range(shape.microbatches - warmup, shape.microbatches):
        yield Bwd(rank, microbatch)
