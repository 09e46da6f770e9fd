"""Picture of a stalled step: the plan over time, finished parts faded, current places outlined, culprits' rows red.

    rank 0   ░F0░░F1░ . ┃B0┃ [B1]      waits for rank 2
    rank 1   ░░░░ ░F0░┃B0┃ . [B1]      waits for rank 2
    rank 2   ░░░░░░░░▐F0▌[B0][F1]      culprit                    times are simulated, not measured

The rows are the pipelines of the culprits, and those of ranks that wait for them while there is room.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from quintsched.plan import simulate
from quintsched.simulation.simulator import Simulation
from quintsched.stalls.last_reported_rank_states import RankState
from quintsched.stalls.stall_report import StallReport

from ..draw_timeline import SMALL, TEXT, TITLE, lay_out, name_times
from ..figure_sheet import LegendKey, Sheet, check_suffix
from ..house_style import QUIET, house_style, printable
from ..instruction_colours import INK
from ..legend import keys_of
from ..page.plan_page import save_untimed
from ..pipeline_rows import band, draw_rows, rectangle, set_time_axis
from ..timeline_objects import Scene, stage_scene

MOST_ROWS = 32
"""Maximum number of rows, unless the first culprit's pipeline alone has more."""

MOST_LINES, LINE_LETTERS = 6, 120
"""Maximum number of lines of the message above the picture, and of characters per line."""

BLAME = "#C1121F"
FADE, LIGHT = 0.72, 0.14
"""Opacity of the white over finished parts, and of the red in a culprit's row."""

STANDS_POINTS, BLAME_POINTS = 1.8, 2.6

LEAST_WIDTH = 0.012
"""Minimum width of an outline, as a fraction of the makespan: messages take no time in a plan without costs."""


Corners = list[tuple[float, float]]


def render_stall(report: StallReport, path: Path) -> None:
    """Draw the positions of ranks in a report, into a `.png` or `.svg` file, or an interactive `.html` page.

    Raises `UsageError` for another suffix and for a path that cannot be written, `UnsoundError` for a plan that cannot
    be simulated.
    """
    check_suffix(path, ".html")
    if path.suffix.lower() == ".html":
        save_untimed(report.plan, path, report=report)
        return
    simulation = simulate(report.plan)
    with house_style():
        draw_stall(report, simulation).write_picture(path)


def draw_stall(report: StallReport, simulation: Simulation) -> Sheet:
    """Return a drawing of a report, in the current style."""
    rows = shown_ranks(report)
    scene = _scene_of(report, simulation, rows)
    sheet, scale = lay_out([scene], rows_per_inch=2.0)
    sheet.line(printable(report.plan.title), TITLE, bold=True)
    lines = [
        (part, BLAME if number < len(report.culprits) else QUIET)
        for number, line in enumerate(report.words().splitlines())
        for part in wrap(printable(line), LINE_LETTERS)
    ]
    for part, colour in lines[:MOST_LINES]:
        sheet.line(part, TEXT, colour=colour)
    sheet.space(0.06)
    size = SMALL * sheet.font_scale
    sheet.legend([*_keys(size), *keys_of([scene], scale, size)], SMALL)
    sheet.space(0.08)
    axes = sheet.block(scene.ranks * scale.row_points / 72)
    draw_rows(axes, scene, scale, TEXT * sheet.font_scale)
    set_time_axis(axes, scene.makespan, scale)
    _draw_standing(axes, report, simulation, rows)
    name_times(sheet, axes, simulation.unit)
    return sheet


def shown_ranks(report: StallReport) -> list[int]:
    """Return the ranks that get a row: whole pipelines, first of culprits, then of ranks that wait for them."""
    mesh, found = report.plan.mesh, dict[int, None]()
    wanted = [*report.ranks, *(link.waiter.rank for link in report.chain), *(state.rank for state in report.states), 0]
    for rank in wanted:
        if rank in found:
            continue
        line = [mesh.rank(mesh.coordinates(rank) | {"pp": k}) for k in range(mesh.pp)]
        if not found or len(found) + len(line) <= MOST_ROWS:
            found.update(dict.fromkeys(line))
    return sorted(found)


def _scene_of(report: StallReport, simulation: Simulation, rows: list[int]) -> Scene:
    """Return the plan's scene with one row for each of these global ranks."""
    mesh, scene = report.plan.mesh, stage_scene(simulation)
    of_pp = [mesh.pp_rank(rank) for rank in rows]
    waits = {link.waiter.rank: f"waits for rank {link.waits_for.rank}" for link in report.chain}
    return replace(
        scene,
        ranks=len(rows),
        busy=tuple(scene.busy[pp] for pp in of_pp),
        boxes=tuple(replace(box, rank=row) for row, pp in enumerate(of_pp) for box in scene.boxes if box.rank == pp),
        arrows=(),
        marks=tuple(replace(mark, rank=row) for row, pp in enumerate(of_pp) for mark in scene.marks if mark.rank == pp),
        bars=tuple(replace(bar, rank=row) for row, pp in enumerate(of_pp) for bar in scene.bars if bar.rank == pp),
        strips=tuple(replace(one, rank=row) for row, pp in enumerate(of_pp) for one in scene.strips if one.rank == pp),
        names=tuple(f"rank {rank}" for rank in rows),
        notes=tuple("culprit" if rank in report.ranks else waits.get(rank, "") for rank in rows),
    )


def _draw_standing(axes: Axes, report: StallReport, simulation: Simulation, rows: list[int]) -> None:
    """Fade finished parts, outline the current places of ranks, and tint the rows of culprits red."""
    states, drawn = {state.rank: state for state in report.states}, _drawn_run(report)
    blamed = {culprit.rank: culprit.place.index for culprit in report.culprits}
    done, stuck, faults = list[Corners](), list[Corners](), list[Corners]()
    for row, rank in enumerate(rows):
        top, bottom = band(row)
        pp_rank = report.plan.mesh.pp_rank(rank)
        state = states.get(rank)
        place = _place(state, drawn, report.plan.mode)
        end = simulation.makespan
        if isinstance(place, int):
            start, end = _cell(simulation, pp_rank, place)
            (faults if rank in blamed and blamed[rank] == place else stuck).append(rectangle(start, end, top, bottom))
            end = start
        if place is not None:
            done.append(rectangle(0, end, top, bottom))
        index = blamed.get(rank)
        if index is not None and index != place:
            start, end = _cell(simulation, pp_rank, index)
            faults.append(rectangle(start, end, top, bottom))
        if rank in blamed:
            axes.add_patch(
                Rectangle((0, row), simulation.makespan, 1, facecolor=BLAME, alpha=LIGHT, linewidth=0, zorder=0.5)
            )
    _outline(axes, stuck, "stuck", INK, STANDS_POINTS)
    _outline(axes, faults, "culprits", BLAME, BLAME_POINTS)
    faded = PolyCollection(done, facecolors="white", alpha=FADE, linewidths=0, zorder=7, gid="done", clip_on=False)
    axes.add_collection(faded, autolim=False)


def _outline(axes: Axes, cells: list[Corners], gid: str, colour: str, points: float) -> None:
    if cells:
        drawn = PolyCollection(
            cells, facecolors="none", edgecolors=colour, linewidths=points, zorder=8, gid=gid, clip_on=False
        )
        axes.add_collection(drawn, autolim=False)


def _drawn_run(report: StallReport) -> tuple[int, int] | None:
    """Return the run of the plan that is drawn: the first one in which a rank is."""
    inside = [state for state in report.states if state.index is not None and state.program == report.plan.mode]
    return min(map(_run_of, inside), default=None)


def _run_of(state: RankState) -> tuple[int, int]:
    return (0, state.step or 0) if state.run is None else (1, state.run)


def _place(state: RankState | None, drawn: tuple[int, int] | None, mode: str) -> int | float | None:
    """Return a rank's place in the drawn run; None before it, infinity after it."""
    if state is None or drawn is None or _run_of(state) < drawn:
        return None
    inside = _run_of(state) == drawn and state.index is not None and state.program == mode
    return state.index if inside else float("inf")


def _cell(simulation: Simulation, pp_rank: int, index: int) -> tuple[float, float]:
    """Return start and end of an instruction, widened if it takes no time."""
    span = simulation.timeline[pp_rank][index]
    width = max(span.end - span.start, LEAST_WIDTH * simulation.makespan)
    return span.start, span.start + width


def _keys(size: float) -> list[LegendKey]:
    def edged(colour: str, width: float) -> LegendKey:
        def draw(axes: Axes, x: float, y: float) -> None:
            corner = (x, y - size * 0.6)
            axes.add_patch(
                Rectangle(corner, size * 1.6, size * 1.2, facecolor="none", edgecolor=colour, linewidth=width)
            )

        return LegendKey("culprit" if colour == BLAME else "stopped here", size * 1.6, draw)

    return [edged(BLAME, BLAME_POINTS), edged(INK, STANDS_POINTS)]
