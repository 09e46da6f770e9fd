"""Text grid of a simulated plan over time, as `quintsched show` prints it.

rank 0 F0 F1 .  .  B0 -  B1 -
rank 1 .  F0 B0 -  F1 B1 -  .

rank 0 F3&B1 -  F4     an overlapped pair is one entry; its text may fill all columns that it takes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quintsched.errors import UsageError
from quintsched.ir.instruction_set import short
from quintsched.simulation.simulator import Span, TimedRun
from quintsched.simulation.time_window import TimeWindow

MOST_CELLS = 2**25
"""Maximum number of cells, ranks x columns."""

MOST_RANKS_READ, MOST_CELLS_READ = 64, 2**14
"""Maximum number of ranks, and of cells, that are shown unless more are asked for."""

ROUNDING = 1e-9
"""Fraction of a column within which a time is at its edge."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of the grid: its text in columns `first` to `last` - 1."""

    text: str
    first: int
    last: int
    spills: bool

    @property
    def least_width(self) -> int:
        """Column width that fits the text and a blank."""
        return -(-(len(self.text) + 1) // (self.last - self.first if self.spills else 1))

    def cells(self, width: int) -> Iterator[str]:
        """Yield the text of each of its columns."""
        text = f"{self.text} "
        for place in range(self.last - self.first):
            yield text[place * width : (place + 1) * width] or "-"


def time_grid(
    simulation: TimedRun, width: int | None = None, window: TimeWindow | None = None, step: float | None = None
) -> list[str]:
    """Return the schedule over time: one row per pipeline rank, one column per duration of the shortest computation.

    `F3` is the forward of microbatch 3 (`1F3`: of stage 1, if a rank holds several), `F3&B1` an overlap with a
    backward, `-` a further column of the entry before it, `.` idle. `width` wraps the grid into blocks of at most
    that many characters, `window` leaves out other ranks and times, `step` is the time of a column. Raises
    `UsageError` for more than `MOST_CELLS` cells.
    """
    step, rows = _entries(simulation, step)
    columns, before = max([round(simulation.makespan / step), 1, *(row[-1].last for row in rows if row)]), 0
    ranks = range(len(rows))
    if window is not None:
        ranks, before = window.ranks, math.floor(window.start / step + ROUNDING)
        columns = min(columns, max(math.ceil(window.end / step - ROUNDING), before + 1))
        rows = [_within(rows[rank], before, columns) for rank in ranks]
    size = max((entry.least_width for row in rows for entry in row), default=2)
    label = len(f"rank {ranks[-1]} ")
    columns -= before
    per_block = columns if width is None else max((width - label) // size, 1)
    cells = [_cells(row, columns, size) for row in rows]
    lines: list[str] = []
    for first in range(0, columns, per_block):
        if first:
            lines.append("")
        for rank, row in zip(ranks, cells, strict=True):
            block = "".join(f"{cell:<{size}}" for cell in row[first : first + per_block])
            lines.append(f"{f'rank {rank}':<{label}}{block}".rstrip())
    return lines


def shortest(run: TimedRun) -> float:
    """Return the duration of the shortest computation."""
    spans = (span for row in run.timeline for span in row if span.instruction.computes)
    return min((span.end - span.runs for span in spans if span.end > span.runs), default=1.0)


def readable_window(simulation: TimedRun) -> TimeWindow:
    """Return the part of a plan that a reader can take in: all of it, or the first times, of the first ranks."""
    step, rows = _entries(simulation)
    columns = max(round(simulation.makespan / step), 1)
    ranks = range(min(len(rows), MOST_RANKS_READ))
    if len(ranks) == len(rows) and columns * len(rows) <= MOST_CELLS_READ:
        return TimeWindow(ranks, 0.0, simulation.makespan)
    shown = min(columns, MOST_CELLS_READ // max(len(ranks), 1))
    return TimeWindow(ranks, 0.0, simulation.makespan if shown == columns else shown * step)


def _within(entries: list[_Entry], before: int, end: int) -> list[_Entry]:
    """Return the entries between two columns, counted from the first of these."""
    return [
        replace(entry, first=max(entry.first - before, 0), last=min(entry.last, end) - before)
        for entry in entries
        if entry.last > before and entry.first < end
    ]


def _cells(entries: list[_Entry], columns: int, size: int) -> list[str]:
    row = ["."] * columns
    for entry in entries:
        row[entry.first : entry.last] = entry.cells(size)
    return row[:columns]


def _entries(simulation: TimedRun, step: float | None = None) -> tuple[float, list[list[_Entry]]]:
    """Quantize all computations to the plan's time step (one forward of a chunk at unit costs)."""
    computed = [[s for s in row if s.instruction.computes] for row in simulation.timeline]
    step = step or shortest(simulation)
    if simulation.makespan / step * len(computed) > MOST_CELLS:
        raise UsageError(
            f"the grid has more than {MOST_CELLS} cells, since the shortest computation takes {step:g} of "
            f"{simulation.makespan:g}; draw it to scale instead: quintsched render"
        )
    several = len(simulation.plan.stage_to_pp) > simulation.plan.mesh.pp

    return step, [_placed(spans, step, several) for spans in computed]


def _placed(spans: Iterable[Span], step: float, several: bool) -> list[_Entry]:
    """Return the entries of a rank: each has a column at least, so that none is lost where short ones meet."""
    found: list[_Entry] = []
    for span in spans:
        first = round(span.runs / step)
        if found:
            first = max(first, found[-1].first + 1)
            found[-1] = replace(found[-1], last=min(found[-1].last, first))
        text, sides = short(span.instruction, with_stage=several), len(span.instruction.sides)
        found.append(_Entry(text, first, max(round(span.end / step), first + 1), sides > 1))
    return found
