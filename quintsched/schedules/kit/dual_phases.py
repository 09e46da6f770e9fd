"""The eight phases that DualPipe and DualPipeV share (DeepSeek-V3, arXiv:2412.19437; its repository DualPipe).

Two lanes meet on every rank. Lane 0 is the one whose forward arrives first; `depth` is the number of ranks that both
lanes pass, and `position` is this rank's place among them, counted from the end at which lane 0 begins:

    fill     F0 ..., F0 F1 ..., I1 W F1 ...      until backwards of lane 1 have arrived
    steady   F0 B1  F1 B0                        a forward of one lane beside a backward of the other
    drain    B1 F1 B0 ..., B1 B0 ..., W I0 ..., W ...      from half-way on, weight halves are deferred into gaps

A paired forward and backward come one after the other in the plan, or as one `Overlap`.
"""

from collections.abc import Iterator

from quintsched.schedules.kit.orders_from_phases import Both, Phase, Turn

F0, F1, I0, I1, B0, B1, W = Turn.F0, Turn.F1, Turn.I0, Turn.I1, Turn.B0, Turn.B1, Turn.W


def dual_phases(position: int, depth: int, microbatches: int, *, overlap: bool = False) -> Iterator[Phase]:
    """Yield the phases of one rank; each lane has `microbatches`, at least 2 depth."""
    pair = _side_by_side if overlap else _one_after_the_other
    beyond, here = depth - position - 1, position + 1
    yield (F0,), 2 * beyond
    yield (F0, F1), here
    yield (I1, W, F1), beyond
    yield (*pair(F0, B1), *pair(F1, B0)), microbatches - 2 * depth + here
    yield (B1, *pair(F1, B0)), beyond
    yield from _alternating((B1, B0), here)
    yield from _alternating((I1, I0) if here % 2 == 0 else (I0, I1), here)
    yield (W, I0), beyond
    yield (W,), here


def _alternating(turns: tuple[Turn, Turn], number: int) -> Iterator[Phase]:
    """Yield `number` turns that alternate between the two."""
    yield turns, number // 2
    yield turns[:1], number % 2


def _side_by_side(forward: Turn, backward: Turn) -> tuple[Both, ...]:
    return (Both(forward, backward),)


def _one_after_the_other(forward: Turn, backward: Turn) -> tuple[Turn, ...]:
    return forward, backward
