"""The eight phases that DualPipe and DualPipeV share (DeepSeek-V3, arXiv:2412.19437; its repository DualPipe).

Two lanes meet on every rank. Lane 0 is the one whose forward comes here first; `depth` is the length of the line that
both lanes run along, and `position` this rank's place in it, counted from the end where lane 0 begins:

    fill     F0 ..., F0 F1 ..., I1 W F1 ...      until the backwards of lane 1 have come
    steady   F0 B1  F1 B0                        a forward of one lane beside a backward of the other
    drain    B1 F1 B0 ..., B1 B0 ..., W I0 ..., W ...      from half-way on, weight halves wait for the gaps

A forward and a backward that stand side by side may overlap; in the plan they come one after the other.
"""

from collections.abc import Iterator

from quintsched.schedules.kit.phases import Phase, Turn

F0, F1, I0, I1, B0, B1, W = Turn.F0, Turn.F1, Turn.I0, Turn.I1, Turn.B0, Turn.B1, Turn.W


def dual_phases(position: int, depth: int, microbatches: int) -> Iterator[Phase]:
    """Yield the phases of one rank; each lane has `microbatches`, at least 2 depth."""
    beyond, here = depth - position - 1, position + 1
    yield (F0,), 2 * beyond
    yield (F0, F1), here
    yield (I1, W, F1), beyond
    yield (F0, B1, F1, B0), microbatches - 2 * depth + here
    yield (B1, F1, B0), beyond
    yield from _alternating((B1, B0), here)
    yield from _alternating((I1, I0) if here % 2 == 0 else (I0, I1), here)
    yield (W, I0), beyond
    yield (W,), here


def _alternating(turns: tuple[Turn, Turn], number: int) -> Iterator[Phase]:
    """Yield so many turns, the two by turns."""
    yield turns, number // 2
    yield turns[:1], number % 2
