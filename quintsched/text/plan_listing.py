"""Plan as text: list of a rank's instructions, excerpt around a fault, aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quintsched.ir.instruction_set import Instruction, short
from quintsched.ir.plan_data import PlanData

AROUND = 4


def excerpt(plan: PlanData, places: Sequence[tuple[int, int]]) -> list[str]:
    """Return one line per rank with marked instructions: an excerpt around them, with the marked ones in >< ."""
    lines = []
    for rank in sorted({rank for rank, _ in places}):
        marked = {index for r, index in places if r == rank}
        first, last = max(min(marked) - AROUND, 0), max(marked) + AROUND + 1
        program = plan.programs[rank]
        if last - first > 60:
            last = first + 60
        cells = (
            f">{short(i)}<" if index in marked else short(i) for index, i in enumerate(program[first:last], start=first)
        )
        dots = ("… " if first else "", " …" if last < len(program) else "")
        lines.append(f"  rank {rank} from {first}: {dots[0]}{' '.join(cells)}{dots[1]}")
    return lines


def listing(program: Sequence[Instruction]) -> Iterator[str]:
    """Yield one line per instruction, with its index."""
    width = len(str(max(len(program) - 1, 0)))
    return (f"{index:>{width}}  {instruction}" for index, instruction in enumerate(program))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    all_rows = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in all_rows]
