"""Interactive page of a plan: one HTML file that needs nothing else, with the plan, its times and the page's program.

    render -o plan.html ─▶ built.js (built from viz/page/, committed) + gzip(head, columns, times) in base64

The page pans, zooms, searches, explains idle time and edits; `viz/page/` has its sources, `make page` builds them.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.errors import UsageError
from quintsched.files.atomic import write_whole
from quintsched.formats.plan_file_shared_fields import entries_of
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulator import Simulation
from quintsched.simulation.time_window import TimeWindow
from quintsched.trace.measured_trace import MeasuredStep
from quintsched.trace.trace_json import digest_of

from .page_tables import page_tables

if TYPE_CHECKING:
    from quintsched.stalls.stall_report import StallReport

SKELETON = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
</head>
<body>
<script id="data" type="text/plain">{data}</script>
<script>{program}</script>
</body>
</html>
"""
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

EFFORT = 5
"""Compression level: higher ones are slower, and hardly smaller."""


def save_page(
    simulation: Simulation, steps: Sequence[MeasuredStep], path: Path, *, window: TimeWindow | None = None
) -> None:
    """Write the page of a simulated plan, and of measured steps beside it; raises `UsageError` on failure.

    It opens with the ranks and times of `window`.
    """
    write_whole(path, page_of(simulation, steps, path.stem, window=window), "the page")


def save_compared(simulations: Sequence[Simulation], path: Path) -> None:
    """Write the page of several simulated plans, one below the other; raises `UsageError` as `compare` does."""
    require_one_unit(simulations)
    shown = [_Shown.timed(simulation) for simulation in simulations]
    write_whole(path, _page(shown, {"window": None}, path.stem), "the page")


def require_one_unit(simulations: Sequence[Simulation]) -> None:
    """Raise `UsageError` for simulations in different units of time, and for none."""
    units = sorted({simulation.unit for simulation in simulations})
    if len(units) != 1:
        found = f"these are in {' and '.join(units)}" if units else "none is given"
        raise UsageError(f"a comparison needs simulations in one unit of time; {found}")


def save_untimed(plan: PlanData, path: Path, costs: Costs | None = None, *, report: StallReport | None = None) -> None:
    """Write the page of a plan that may be unable to finish; raises `UsageError` on failure.

    The page itself times what can run, and marks the counter-example. With a stall report, it marks where ranks were.
    """
    stall = None if report is None else {**report.model_dump(mode="json"), "words": report.words()}
    write_whole(path, _page([_Shown(plan, costs or Costs(), [], {})], {"stall": stall}, path.stem), "the page")


def page_of(
    simulation: Simulation, steps: Sequence[MeasuredStep], title: str, *, window: TimeWindow | None = None
) -> bytes:
    """Return the text of the page; equal plans and times give identical bytes."""
    shown = _Shown.timed(simulation)
    for number, step in enumerate(steps, start=1):
        spans = [span for row in step.timeline for span in row]
        for name in ("start", "end", "wait"):
            shown.times[f"{name} {number}"] = np.array([getattr(span, name) for span in spans])
        shown.runs.append({"name": f"measured, step {step.number}", "unit": step.unit, "wait": True})
    return _page([shown], {"window": None if window is None else _window(window)}, title)


@dataclass(frozen=True)
class _Shown:
    """Plan of a page, its runs, and their times: `start 0`, `end 0`, …"""

    plan: PlanData
    costs: Costs
    runs: list[dict[str, object]]
    times: Arrays

    @classmethod
    def timed(cls, simulation: Simulation) -> _Shown:
        """Return a plan with its simulated times."""
        times = {"start 0": simulation.start, "end 0": simulation.end}
        return cls(simulation.plan, simulation.costs, [{"name": "planned", "unit": simulation.unit}], times)

    def head(self) -> dict[str, object]:
        """Return what the page's head has of the plan."""
        columns = self.plan.columns
        return {
            "title": self.plan.title,
            "plan": entries_of(self.plan),
            "digest": digest_of(self.plan),
            "table": list(columns.table),
            "columns": list(columns.columns),
            "costs": self.costs.model_dump(mode="json"),
            "runs": self.runs,
        }

    def arrays(self, number: int) -> Arrays:
        """Return the plan's columns and times, as those of the `number`-th plan of the page."""
        columns = self.plan.columns
        fields: Arrays = {f"column {name}": column for name, column in columns.columns.items()}
        mine: Arrays = {"first": columns.first, "op": columns.op, **fields, **self.times}
        return {f"{number} {name}": array for name, array in mine.items()}


def _page(shown: Sequence[_Shown], about: dict[str, object], title: str) -> bytes:
    head: dict[str, object] = {"tables": page_tables(), "plans": [one.head() for one in shown], **about}
    arrays = {name: array for number, one in enumerate(shown) for name, array in one.arrays(number).items()}
    data = base64.b64encode(gzip.compress(_packed(head, arrays), EFFORT, mtime=0)).decode("ascii")
    program = files(__package__).joinpath("built.js").read_text("utf-8")
    return SKELETON.format(title=html.escape(title), data=data, program=program).encode("utf-8")


def _window(window: TimeWindow) -> dict[str, object]:
    return {"ranks": [window.ranks.start, window.ranks.stop - 1], "time": [window.start, window.end]}


def _packed(head: dict[str, object], arrays: Arrays) -> bytes:
    """Return the head as JSON and the arrays in the smallest types that hold them, each padded to 8 bytes."""
    narrow = {name: _narrow(array) for name, array in arrays.items()}
    head["sections"] = [(name, array.dtype.str[1:], len(array)) for name, array in narrow.items()]
    text = json.dumps(head, allow_nan=False).encode("utf-8")
    parts = [len(text).to_bytes(4, "little") + text, *(array.tobytes() for array in narrow.values())]
    return b"".join(part + b"\0" * (-len(part) % 8) for part in parts)


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind == "f" or array.dtype == np.uint8:
        return array.astype("<f8") if array.dtype.kind == "f" else array
    least, most = int(array.min(initial=0)), int(array.max(initial=0))
    fits = (kind for kind in ("<i1", "<i2", "<i4") if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return array.astype(next(fits))
