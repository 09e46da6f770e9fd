"""GPipe (Huang et al. 2019, arXiv:1811.06965), also called AFAB: all forwards, then all backwards.

rank 0  F0 F1 F2 F3 .. .. B0 .... B1 .... B2 .... B3
rank 1  .. F0 F1 F2 F3 B0 .... B1 .... B2 .... B3
"""

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules.kit.registry import Order, Shape, schedule


@schedule(
    "gpipe",
    aliases=("afab",),
    summary="all forwards, then all backwards",
    bubble="(P-1)(F+I+W)",
    memory="M",
)
def gpipe(rank: int, shape: Shape) -> Order:
    """Yield every forward, then every backward, both in the order of the microbatches."""
    for microbatch in range(shape.microbatches):
        yield Fwd(rank, microbatch)
    for microbatch in range(shape.microbatches):
        yield Bwd(rank, microbatch)
