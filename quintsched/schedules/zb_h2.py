"""ZB-H2 (Qi et al. 2023, arXiv:2401.10241): ZB-H1 with twice the warm-up, so that no rank is idle within its span.

rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 …
rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 …      weight halves are 2·rank late

Where M >= 2P-1, beyond M(F+I+W) the longest span is (P-1)·max(F+I-2·min(F,W), 0), and the makespan the same with F in
the place of 0: a step that waits for all ranks gains little over ZB-H1. The span is the paper's (P-1)(F+I-2W) exactly
where, besides, W <= F and 2W <= F+I (or P = 1, or W = 0).
"""

from quintsched.ir.instruction_set import BwdInput, BwdWeight, Fwd
from quintsched.schedules.kit.orders_from_phases import windows
from quintsched.schedules.kit.registry import Order, Shape, schedule


@schedule(
    "zb-h2",
    summary="ZB-H1 with twice the warm-up: no idle time in a rank's span",
    bubble="(P-1)·max(F+I-2·min(F,W), F) where M>=2P-1 (in a span: 0 for the last F)",
    memory="min(2P-1, M)",
)
def zb_h2(rank: int, shape: Shape) -> Order:
    """Yield split 1F1B, with two forwards of lead per later rank and two microbatches of delay per earlier rank."""
    warmup, late = min(2 * (shape.pp - rank - 1), shape.microbatches), 2 * rank
    for k in windows(shape.microbatches, 0, warmup, warmup + late):
        if k < shape.microbatches:
            yield Fwd(rank, k)
        if 0 <= k - warmup < shape.microbatches:
            yield BwdInput(rank, k - warmup)
        if k >= warmup + late:
            yield BwdWeight(rank, k - warmup - late)
