"""ZB-H1 (Qi et al. 2023, arXiv:2401.10241): 1F1B with split backwards that fill the bubble, in the memory of 1F1B.

rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 …
rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 …      weight halves are `rank` microbatches late

Beyond M(F+I+W), the makespan is (P-1)(F+I) - (min(P,M)-1)·min(F,I,W), and the longest span the same with min(F,W).
That is the paper's (P-1)(F+I-W) exactly where M >= P and W <= F, I (or P = 1, or W = 0).
"""

from quintsched.ir.instruction_set import BwdInput, BwdWeight, Fwd
from quintsched.schedules.kit.orders_from_phases import windows
from quintsched.schedules.kit.registry import Order, Shape, schedule


@schedule(
    "zb-h1",
    aliases=("zb-1p",),
    summary="1F1B with split backwards; weight halves fill the bubble",
    bubble="(P-1)(F+I)-(min(P,M)-1)·min(F,I,W)",
    memory="min(P, M)",
)
def zb_h1(rank: int, shape: Shape) -> Order:
    """Yield 1F1B with each weight half `rank` microbatches after its input half, so that P activations are resident."""
    warmup, late = min(shape.pp - rank - 1, shape.microbatches), rank
    for k in windows(shape.microbatches, 0, warmup, warmup + late):
        if k < shape.microbatches:
            yield Fwd(rank, k)
        if 0 <= k - warmup < shape.microbatches:
            yield BwdInput(rank, k - warmup)
        if k >= warmup + late:
            yield BwdWeight(rank, k - warmup - late)
