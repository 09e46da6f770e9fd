"""A simulated plan as text, on a raster of time: what `quintsched show` prints.

rank 0 F0 F1 .  .  B0 -  B1 -
rank 1 .  F0 B0 -  F1 B1 -  .
"""

from __future__ import annotations

from quintsched.errors import UsageError
from quintsched.ir.instructions import short
from quintsched.simulation.simulator import Simulation

MOST_CELLS = 2**25
"""Of a grid, ranks and columns together."""


def time_grid(simulation: Simulation, width: int | None = None) -> list[str]:
    """Return the schedule over time: a row per pipeline rank, a column per step of the shortest computation.

    `F3` is the forward of microbatch 3 (`1F3`: of stage 1, where a rank holds several), `--` its backward's second
    step, `.` idle. `width` wraps the grid into blocks of at most that many characters. Raises `UsageError` for more
    than `MOST_CELLS` cells.
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
    computed = [[s for s in row if s.instruction.computes] for row in simulation.timeline]
    step = min((s.end - s.start for row in computed for s in row if s.end > s.start), default=1.0)
    if simulation.makespan / step * len(computed) > MOST_CELLS:
        raise UsageError(
            f"the grid has more than {MOST_CELLS} cells, since the shortest computation takes {step:g} of "
            f"{simulation.makespan:g}; draw it to scale instead: quintsched render"
        )
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
