"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503): alternating forwards and backwards.

rank 0  F0 F1 .. .. B0 .... F2 B1 .... F3 B2 ....       at most P - rank activations are resident
rank 1  .. F0 B0 .... F1 B1 .... F2 B2 .... F3 B3
"""

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules.kit.registry import Order, Shape, schedule


@schedule(
    "1f1b",
    summary="one forward, one backward, after a warm-up",
    bubble="(P-1)(F+I+W)",
    memory="min(P-r, M)",
)
def one_f_one_b(rank: int, shape: Shape) -> Order:
    """Yield a warm-up of one forward per later rank, then forward-backward pairs, then the remaining backwards."""
    warmup = min(shape.pp - rank - 1, shape.microbatches)
    for microbatch in range(warmup):
        yield Fwd(rank, microbatch)
    for microbatch in range(warmup, shape.microbatches):
        yield Fwd(rank, microbatch)
        yield Bwd(rank, microbatch - warmup)
    for microbatch in range(shape.microbatches - warmup, shape.microbatches):
        yield Bwd(rank, microbatch)
