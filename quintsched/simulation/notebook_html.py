"""Simulated plans and verdicts as HTML for notebooks: plain strings, escaped, without scripts or dependencies.

    ┌────────────────────────────────────────────┐
    │ 1f1b on pp=2, 4 microbatches               │     makespan 15, bubble 20.0 %, …
    │ 0 [F0][F1]        [  B0  ][F2][  B1  ]  …  │     one row per pipeline rank, widths to scale
    │ 1     [F0][  B0  ][F1][  B1  ]  …          │
    └────────────────────────────────────────────┘

Of a large plan only a window is drawn: the first ranks, until so many computations have begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

import numpy as np

from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_columns import Ints
from quintsched.ir.instruction_set import COMPUTING, Instruction, short
from quintsched.ir.plan_data import PlanData

MOST_RANKS, MOST_BOXES = 16, 400
"""Size of the window of a drawing."""

MOST_TIMED = 2**16
"""The most instructions of a plan that is timed only to be shown."""

MOST_EXPLANATION_LETTERS = 4000
"""Length of an explanation that is shown, in letters."""

_WIDTH, _ROW, _LABEL, _LETTER = 900, 22, 30, 6.5
"""In pixels: of a timeline, of a row of it, of what stands before it, and of a letter."""
_FILLS = {"F": "#8fc1e3", "B": "#f0a787", "I": "#f6cf7f", "W": "#8fd3b6", "RF": "#c4aedd", "&": "#c9c9c9"}


def figures(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of two columns, names and values, both escaped."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def rows_of(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table with a header, all escaped."""
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>{cells}</table>"


def heading(text: str) -> str:
    """Return a line in bold, escaped."""
    return f"<p><b>{escape(text)}</b></p>"


def words(text: str) -> str:
    """Return text as it stands, escaped, the beginning of it where it is long."""
    shown = text if len(text) <= MOST_EXPLANATION_LETTERS else f"{text[:MOST_EXPLANATION_LETTERS]}\n…"
    return f"<pre>{escape(shown)}</pre>"


def timeline_svg(plan: PlanData, start: Times, end: Times, unit: str) -> str:
    """Return a timeline as SVG, a row per pipeline rank, and in words which part of it is shown.

    `start` and `end` have a time per row of the plan's columns, in `unit`.
    """
    columns = plan.columns
    num_ranks = min(columns.num_ranks, MOST_RANKS)
    rows = columns.rows_where(*COMPUTING)
    rows = rows[rows < columns.first[num_ranks]]
    drawn = np.sort(rows[np.argsort(start[rows], kind="stable")][:MOST_BOXES])
    until, makespan = float(end[drawn].max(initial=0.0)) or 1.0, float(end.max(initial=0.0))
    labels = "".join(f'<text x="2" y="{rank * _ROW + 15}">{rank}</text>' for rank in range(num_ranks))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LABEL} {num_ranks * _ROW}" width="100%" '
        f'style="max-width:{_WIDTH + _LABEL}px;background:#fff" font-family="sans-serif" font-size="10">'
        f"{labels}{''.join(_boxes(plan, drawn, start[drawn], end[drawn], _WIDTH / until))}</svg>"
    )
    is_all = num_ranks == columns.num_ranks and len(drawn) == len(rows)
    part = f"pipeline ranks 0 to {num_ranks - 1} of {columns.num_ranks}, until {until:g} of {makespan:g} {unit}"
    return svg if is_all else f"{svg}<p>{escape(part)}</p>"


def _boxes(plan: PlanData, rows: Ints, start: Times, end: Times, scale: float) -> Iterator[str]:
    """Yield a rectangle for each of these rows of the plan, with its letters where there is room."""
    several = len(plan.stage_to_pp) > plan.mesh.pp
    instructions, ranks = plan.columns.instructions(rows.tolist()), plan.columns.rank[rows].tolist()
    for found, rank, begins, ends in zip(instructions, ranks, start.tolist(), end.tolist(), strict=True):
        x, width, y = _LABEL + begins * scale, max((ends - begins) * scale, 0.5), rank * _ROW
        text = short(found, with_stage=several)
        yield (
            f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{_ROW - 2}" fill="{_fill(found)}" '
            f'stroke="#fff"><title>{escape(f"{found} {begins:g} to {ends:g}")}</title></rect>'
        )
        if len(text) * _LETTER < width:
            yield f'<text x="{x + 2:.1f}" y="{y + 15}" fill="#1f2933" pointer-events="none">{escape(text)}</text>'


def _fill(instruction: Instruction) -> str:
    return _FILLS.get(instruction.letters, "#dddddd")
