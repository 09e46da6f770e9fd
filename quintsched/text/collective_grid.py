"""Text grid of a collective: one row per rank, one column per step; each cell names the chunk that arrives.

rank 0  1+ 0+ 2  1        1+: chunk 1 arrives and is added
rank 1  2+ 1+ 0  2        2:  chunk 2 arrives and is stored        a dot: the rank only sends, or waits
"""

from __future__ import annotations

from quintsched.collectives.collective_program import CollectiveProgram
from quintsched.collectives.collective_timing import simulate
from quintsched.ir.collective_means_and_wire import Wire


def time_grid(plan: CollectiveProgram, width: int | None = None) -> list[str]:
    """Return the grid of a sound collective, where a message takes one step.

    `width` wraps it into blocks of at most that many characters.
    """
    at = [round(start) for start in simulate(plan, 0.0, Wire(latency_s=1.0)).start]
    columns = max(at, default=-1) + 1
    rows = [["."] * columns for _ in range(plan.size)]
    for column, (_, received) in zip(at, plan.messages, strict=True):
        rows[received.rank][column] = f"{received.chunk}{'+' if received.reduce else ''}"
    size = max((len(cell) for row in rows for cell in row), default=1) + 1
    label = len(f"rank {plan.size - 1}  ")
    per_block = max(columns if width is None else (width - label) // size, 1)
    lines: list[str] = []
    for first in range(0, columns, per_block):
        lines += [""] if first else []
        for rank, row in enumerate(rows):
            cells = "".join(f"{cell:<{size}}" for cell in row[first : first + per_block])
            lines.append(f"{f'rank {rank}':<{label}}{cells}".rstrip())
    return lines
