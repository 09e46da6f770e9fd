"""Pictures of plans and measured steps: one row per pipeline rank over time, with a memory panel below.

render(plan.simulate(), Path("1f1b.png"))                one plan, with its memory panel
compare([a.simulate(), b.simulate()], Path("two.svg"))   several on one time axis
render_measured(plan.simulate(costs), step, Path("x.png"))  a measured step under its plan, on one time axis
render_collective(spell("all_reduce", "ring", 8).simulate(25e6, wire), Path("ring.png"))   a spelled-out collective
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from quintsched.collectives import CollectiveRun
from quintsched.errors import UsageError
from quintsched.files.terminal import percent
from quintsched.simulation.held_activations import HeldActivations, held_activations
from quintsched.simulation.idle_time import MOST_EXPLAINED, times_of_ranks
from quintsched.simulation.simulator import Simulation
from quintsched.simulation.time_window import TimeWindow
from quintsched.trace.measured_trace import MeasuredStep

from .activation_panel import draw_held, held_height, held_key
from .collective_scene import chunk_scene
from .figure_sheet import POINTS, Sheet, check_suffix
from .house_style import DIGIT_EM, QUIET, duration, house_style, number, printable, text_width
from .idle_panel import draw_idle, idle_height, idle_keys
from .legend import keys_of
from .page.plan_page import require_one_unit, save_compared, save_page
from .pipeline_rows import PaperScale, draw_rows, set_time_axis, tail_points
from .timeline_objects import Scene, stage_scene
from .timeline_window import held_within, label_from, scene_within

NARROWEST, WIDEST = 9.0, 28.0
"""Limits of a picture's width, in inches."""

TALLEST = 16.0
"""Maximum height of all rows of a picture, in inches."""

TEXT, TITLE, SMALL = 9.0, 13.0, 8.5

PAGE = ".html"


def render(simulation: Simulation, path: Path, *, window: TimeWindow | None = None) -> None:
    """Draw one simulated plan into a `.png` or `.svg` file, or an interactive `.html` page; equal plans, equal bytes.

    `window` leaves out other ranks and times; a page opens with it. Raises `UsageError` for another suffix and for a
    path that cannot be written.
    """
    check_suffix(path, PAGE)
    if path.suffix.lower() == PAGE:
        save_page(simulation, (), path, window=window)
        return
    with house_style():
        draw_plan(simulation, window).write_picture(path)


def compare(simulations: Sequence[Simulation], path: Path) -> None:
    """Draw several simulated plans below each other on one time axis, into a file as `render` does.

    Raises `UsageError` for another suffix, a path that cannot be written, an empty list, and simulations in different
    units of time.
    """
    check_suffix(path, PAGE)
    if path.suffix.lower() == PAGE:
        save_compared(simulations, path)
        return
    require_one_unit(simulations)
    with house_style():
        draw_comparison(simulations).write_picture(path)


def render_measured(
    simulation: Simulation, steps: Sequence[MeasuredStep], path: Path, *, window: TimeWindow | None = None
) -> None:
    """Draw measured steps under their simulated plan, on one time axis, into a file as `render` does.

    Raises `UsageError` as `render` does, and for times in different units.
    """
    check_suffix(path, PAGE)
    for step in steps:
        if simulation.unit != step.unit:
            raise UsageError(f"the plan's times are in {simulation.unit}, those of the step in {step.unit}")
    if path.suffix.lower() == PAGE:
        save_page(simulation, steps, path, window=window)
        return
    with house_style():
        draw_measured(simulation, steps, window).write_picture(path)


def render_collective(run: CollectiveRun, path: Path) -> None:
    """Draw a spelled-out collective over time, one row per rank, into a `.png` or `.svg` file."""
    check_suffix(path)
    with house_style():
        draw_collective(run).write_picture(path)


def draw_plan(simulation: Simulation, window: TimeWindow | None = None) -> Sheet:
    """Return a drawing of one plan, or of a part of it, in the current style."""
    scene, held = stage_scene(simulation), held_activations(simulation, simulation.costs)
    if window is not None:
        scene, held = scene_within(scene, window), held_within(held, window)
    sheet, scale = lay_out([scene], rows_per_inch=2.0)
    sheet.line(printable(simulation.plan.title), TITLE, bold=True)
    shown = "" if window is None else f" · {window.words(simulation)}"
    sheet.line(_figures(simulation) + shown, TEXT, colour=QUIET)
    sheet.space(0.06)
    sheet.legend(keys_of([scene], scale, SMALL * sheet.font_scale), SMALL)
    sheet.space(0.08)
    axes = _add_rows(sheet, scene, scale, scene.makespan)
    if held:
        _hide_times(axes)
        axes = _add_held(sheet, held, scene.makespan, scale)
    if window is not None:
        label_from(axes, window.start)
    name_times(sheet, axes, simulation.unit)
    return sheet


def draw_comparison(simulations: Sequence[Simulation]) -> Sheet:
    """Return a drawing of several plans, in the current style."""
    scenes = [stage_scene(simulation) for simulation in simulations]
    until = max(scene.makespan for scene in scenes)
    sheet, scale = lay_out(scenes, rows_per_inch=2.6)
    sheet.legend(keys_of(scenes, scale, SMALL * sheet.font_scale), SMALL)
    for simulation, scene in zip(simulations, scenes, strict=True):
        sheet.space(0.12)
        sheet.line(printable(simulation.plan.title), TITLE * 0.85, bold=True)
        peak = f" · peak activations {number(max(simulation.peak_activations))}"
        sheet.line(_figures(simulation) + peak, TEXT, colour=QUIET)
        sheet.space(0.03)
        axes = _add_rows(sheet, scene, scale, until)
        _hide_times(axes)
        axes = _add_where_time_goes(sheet, simulation, scale, until, axes)
        if scene is not scenes[-1]:
            _hide_times(axes)
    name_times(sheet, axes, simulations[0].unit)
    return sheet


def _add_where_time_goes(sheet: Sheet, simulation: Simulation, scale: PaperScale, until: float, axes: Axes) -> Axes:
    """Add the activations of a plan's ranks, and bars of their idle time; return the last of the axes."""
    font = TEXT * sheet.font_scale
    if held := held_activations(simulation, simulation.costs):
        axes = _add_held(sheet, held, until, scale)
        _hide_times(axes)
    if simulation.plan.num_instructions <= MOST_EXPLAINED and simulation.makespan:
        times = times_of_ranks(simulation)
        sheet.space(0.1)
        sheet.legend(idle_keys(times, simulation.makespan, SMALL * sheet.font_scale), SMALL)
        axes = sheet.block(idle_height(len(times), font))
        draw_idle(axes, times, font * 0.9)
        set_time_axis(axes, until, scale)
    return axes


def draw_measured(simulation: Simulation, steps: Sequence[MeasuredStep], window: TimeWindow | None = None) -> Sheet:
    """Return a drawing of measured steps under their simulated plan, in the current style."""
    runs: list[Simulation | MeasuredStep] = [simulation, *steps]
    scenes = [stage_scene(run) for run in runs]
    if window is not None:
        scenes = [scene_within(scene, window) for scene in scenes]
    until = max(scene.makespan for scene in scenes)
    sheet, scale = lay_out(scenes, rows_per_inch=2.2)
    sheet.line(printable(simulation.plan.title), TITLE, bold=True)
    sheet.line(_comparison(simulation, steps), TEXT, colour=QUIET)
    sheet.space(0.06)
    sheet.legend(keys_of(scenes, scale, SMALL * sheet.font_scale), SMALL)
    names = ["planned", *(f"measured, step {step.number}" for step in steps)]
    for name, scene, figures in zip(names, scenes, map(_main_figures, runs), strict=True):
        sheet.space(0.1)
        sheet.line(name, TITLE * 0.8, bold=True)
        sheet.line(figures, TEXT, colour=QUIET)
        sheet.space(0.03)
        axes = _add_rows(sheet, scene, scale, until)
        if scene is not scenes[-1]:
            _hide_times(axes)
    if window is not None:
        label_from(axes, window.start)
    name_times(sheet, axes, simulation.unit)
    return sheet


def draw_collective(run: CollectiveRun) -> Sheet:
    """Return a drawing of a spelled-out collective, in the current style."""
    scene = chunk_scene(run)
    sheet, scale = lay_out([scene], rows_per_inch=2.4)
    sheet.line(run.plan.title, TITLE, bold=True)
    figures = f"{number(run.num_bytes)} bytes in {duration(run.makespan, 's')}"
    sheet.line(f"{figures} · bandwidth use {percent(run.bandwidth_use)}", TEXT, colour=QUIET)
    sheet.space(0.06)
    sheet.legend(keys_of([scene], scale, SMALL * sheet.font_scale), SMALL)
    sheet.space(0.08)
    name_times(sheet, _add_rows(sheet, scene, scale, scene.makespan), "s")
    return sheet


def _comparison(simulation: Simulation, steps: Sequence[MeasuredStep]) -> str:
    if not simulation.makespan:
        return "measured under planned"
    more = sum(step.makespan for step in steps) / (len(steps) * simulation.makespan) - 1
    took = "the step took" if len(steps) == 1 else f"the {len(steps)} steps took on average"
    if abs(more) < 0.0005:
        return f"measured under planned: {took} as long as planned"
    return f"measured under planned: {took} {percent(abs(more))} {'longer' if more >= 0 else 'less'} than planned"


def _main_figures(run: Simulation | MeasuredStep) -> str:
    return f"makespan {duration(run.makespan, run.unit)} · bubble {percent(run.bubble)} of all ranks' time"


def _figures(simulation: Simulation) -> str:
    return f"{_main_figures(simulation)} · span bubble {percent(simulation.span_bubble)} of the longest rank's span"


def lay_out(scenes: Sequence[Scene], rows_per_inch: float) -> tuple[Sheet, PaperScale]:
    """Return the sheet and the scale, chosen so that numbers fit into boxes, within limits of the page size."""
    until = max(scene.makespan for scene in scenes)
    tail = tail_points(scenes)
    wanted = _points_per_time(scenes) * until / POINTS + 2.0
    width = float(np.clip(wanted, NARROWEST, WIDEST))
    font_scale = float(np.clip((width / NARROWEST) ** 0.5, 1.0, 1.5))
    ranks = max(scene.ranks for scene in scenes)
    names = [scene.names[-1] if scene.names else f"rank {scene.ranks - 1}" for scene in scenes]
    left = (max(text_width(name, TEXT * font_scale) for name in names) + 10) / POINTS
    right = (text_width(f"rank {ranks - 1}: peak 00.00", TEXT * font_scale * 0.9) + 12) / POINTS
    sheet = Sheet(width, left, right, font_scale)
    sheet.space(0.12)
    rows = sum(scene.ranks for scene in scenes)
    row = min(1 / rows_per_inch, max(0.18, 4.8 / ranks), TALLEST / rows) * font_scale**0.5
    points_per_time = (sheet.inner_width - tail) / until if until else 1.0
    return sheet, PaperScale(points_per_time, row * POINTS, tail, max(scene.chunks for scene in scenes))


def _points_per_time(scenes: Sequence[Scene]) -> float:
    """Return the points per unit of time at which the microbatch's number fits into most boxes."""
    widths = [box.end - box.start for scene in scenes for box in scene.boxes if box.end > box.start]
    if not widths:
        return 1.0
    digits = max(len(str(box.instruction.microbatch)) for scene in scenes for box in scene.boxes)
    return (digits * DIGIT_EM * 8.0 + 5.0) / float(np.quantile(widths, 0.25))


def _add_rows(sheet: Sheet, scene: Scene, scale: PaperScale, until: float) -> Axes:
    axes = sheet.block(scene.ranks * scale.row_points / POINTS)
    draw_rows(axes, scene, scale, TEXT * sheet.font_scale)
    set_time_axis(axes, until, scale)
    return axes


def _add_held(sheet: Sheet, held: Sequence[HeldActivations], until: float, scale: PaperScale) -> Axes:
    font = TEXT * sheet.font_scale
    sheet.space(0.14)
    sheet.legend([held_key(held, font)], TEXT)
    sheet.space(0.04)
    height = held_height(len(held), font)
    axes = sheet.block(height)
    draw_held(axes, held, until, font, height * POINTS)
    set_time_axis(axes, until, scale)
    return axes


def _hide_times(axes: Axes) -> None:
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.spines["bottom"].set_visible(False)


def name_times(sheet: Sheet, axes: Axes, unit: str) -> None:
    """Label the time axis, which ends a sheet."""
    size = TEXT * sheet.font_scale
    label = f"time ({printable('forwards' if unit == 'forward' else unit)})"
    axes.tick_params(axis="x", labelsize=size)
    axes.set_xlabel(label, fontsize=sheet.fit_text(label, TEXT))
    sheet.space((size * 4.2) / POINTS)
