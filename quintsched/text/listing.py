"""A plan as text: the grid of its schedule, one rank's list, and the surroundings of a fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from quintsched.ir.instructions import Compute, Instruction, short
from quintsched.plan import Plan

if TYPE_CHECKING:
    from quintsched.simulation.simulator import Simulation

AROUND = 4


def excerpt(plan: Plan, places: Sequence[tuple[int, int]]) -> list[str]:
    """Return one line per rank that is marked: the instructions around its marked ones, which stand in >< ."""
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


def time_grid(simulation: Simulation, width: int | None = None) -> list[str]:
    """Return the schedule over time: a row per pipeline rank, a column per step of the shortest computation.

    `F3` is the forward of microbatch 3 (`1F3`: of stage 1, where a rank holds several), `--` its backward's second
    step, `.` idle. `width` wraps the grid into blocks of at most that many characters.
    """
    rows = _cells(simulation)
    size = max((len(cell) for row in rows for cell in row), default=1) + 1
    label = len(f"rank {len(rows) - 1} ")
    columns = len(rows[0])
    per_block = columns if width is None else max((width - label) // size, 1)
    lines: list[str] = []
    for first in range(0, columns, per_block):
        if first:
            lines.append("")
        for rank, row in enumerate(rows):
            cells = "".join(f"{cell:<{size}}" for cell in row[first : first + per_block])
            lines.append(f"{f'rank {rank}':<{label}}{cells}".rstrip())
    return lines


def _cells(simulation: Simulation) -> list[list[str]]:
    """Lay every computation on a raster of the plan's time step (one forward of a chunk at unit costs)."""
    computed = [[s for s in row if isinstance(s.instruction, Compute)] for row in simulation.timeline]
    step = min((s.end - s.start for row in computed for s in row if s.end > s.start), default=1.0)
    columns = max(round(simulation.makespan / step), 1)
    several = len(simulation.plan.stage_to_pp) > simulation.plan.mesh.pp
    rows = []
    for spans in computed:
        row = ["."] * columns
        for span in spans:
            first = round(span.start / step)
            last = max(round(span.end / step), first + 1)
            row[first:last] = [short(span.instruction, with_stage=several), *["-"] * (last - first - 1)]
        rows.append(row[:columns])
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return aligned columns of text."""
    all_rows = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in all_rows]
