"""Picture of a search for strategies: time against memory, the Pareto front, and the best strategies by name.

memory │ ●──┐                     front: faster than all with no more memory
       │    ●───┐   2             numbers: the best, named below
       │  1     ●──────┐
       └───────────────────▶ time of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from quintsched.errors import UsageError, counted
from quintsched.strategies.descriptions.strategy_text import duration, gigabytes, strategy_name
from quintsched.strategies.tuning.tune import Candidate, Tuning

from .figure_sheet import Sheet, check_suffix
from .house_style import HAIRLINE, QUIET, house_style, printable
from .instruction_colours import INK

WIDTH, HEIGHT = 9.0, 4.6
TEXT, TITLE, SMALL = 9.0, 13.0, 8.5
FRONT, BEST = "#0072B2", "#D55E00"
NAMED = 10
"""Number of the best strategies that are named."""
SLOWEST = 2.0
"""Upper end of the drawn front, relative to the best time; or the last named strategy, if that is slower."""
NEAR_UP, NEAR_ACROSS, NUMBER_WIDE = 0.05, 0.02, 0.03
"""Points closer than these fractions of the picture get their numbers side by side; the last is a number's width."""


def render_tuning(tuning: Tuning, path: Path) -> None:
    """Draw a search's result into a `.png` or `.svg` file; equal results give identical bytes.

    Raises `UsageError` for another suffix, a path that cannot be written, and a search without result.
    """
    check_suffix(path)
    if not tuning.best:
        raise UsageError(f"{path}: there is nothing to draw: no strategy fits")
    with house_style():
        draw_tuning(tuning).write_picture(path)


def draw_tuning(tuning: Tuning) -> Sheet:
    """Return a drawing of a search's result, in the current style."""
    sheet = Sheet(width=WIDTH, left=0.75, right=0.45)
    space = tuning.space
    samples = counted(space.batch, "sample")
    where = f"{tuning.model.name} on {space.gpus} {tuning.hardware.name}, {samples} of {space.seq} tokens"
    sheet.space(0.1)
    sheet.line(printable(where), TITLE, bold=True)
    sheet.line("blue: faster than all that hold as little; numbers: the best, named below", TEXT, colour=QUIET)
    sheet.space(0.1)
    axes = sheet.block(HEIGHT)
    best = tuning.best[:NAMED]
    until = max(SLOWEST * best[0].step_s, best[-1].step_s)
    front = [found for found in tuning.front if found.step_s <= until]
    _draw_points(axes, front, best)
    _draw_limits(axes, tuning, [*front, *best])
    _draw_numbers(axes, best)
    sheet.space(0.62)
    for number, found in enumerate(best, start=1):
        figures = f"{duration(found.step_s)}, {gigabytes(found.memory_bytes)} GB"
        sheet.line(printable(f"{number}   {figures}   {strategy_name(found.strategy)}"), SMALL)
    sheet.space(0.1)
    return sheet


def _draw_points(axes: Axes, front: Sequence[Candidate], best: Sequence[Candidate]) -> None:
    axes.plot(*_places(front), drawstyle="steps-post", color=FRONT, linewidth=1.2, zorder=2, gid="front-line")
    axes.plot(*_places(front), linestyle="none", marker="o", markersize=4, color=FRONT, zorder=3, gid="front")
    axes.plot(*_places(best), linestyle="none", marker="o", markersize=7, color=BEST, zorder=4, gid="best")


def _draw_numbers(axes: Axes, best: Sequence[Candidate]) -> None:
    """Write the numbers of the best beside their points; numbers that would overlap, side by side."""
    (left, right), (_, top) = axes.get_xlim(), axes.get_ylim()
    groups: list[tuple[float, float, list[int]]] = []
    for number, found in enumerate(best):
        across, up = (found.step_s - left) / (right - left), found.memory_bytes / 1e9 / top
        for x, y, numbers in groups:
            if abs(up - y) < NEAR_UP and abs(across - x) < NEAR_ACROSS + NUMBER_WIDE * (len(numbers) + 1):
                numbers.append(number)
                break
        else:
            groups.append((across, up, [number]))
    for _, _, numbers in groups:
        last = max((best[number] for number in numbers), key=lambda found: found.step_s)
        text = ", ".join(str(number + 1) for number in numbers)
        place = (last.step_s, last.memory_bytes / 1e9)
        axes.annotate(text, place, xytext=(6, 4), textcoords="offset points", fontsize=SMALL, zorder=5)


def _places(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [found.step_s for found in candidates], [found.memory_bytes / 1e9 for found in candidates]


def _draw_limits(axes: Axes, tuning: Tuning, shown: Sequence[Candidate]) -> None:
    """Set up the axes, from 0 to the memory of a GPU and beyond, with a line for that memory."""
    capacity = tuning.hardware.memory_gb
    times = [found.step_s for found in shown]
    room = (max(times) - min(times)) * 0.05 or max(times) * 0.1
    axes.set_xlim(min(times) - room, max(times) + room)
    axes.set_ylim(0, capacity * 1.1)
    axes.axhline(capacity, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        f"what a GPU has, {capacity:g} GB",
        (1, capacity),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        fontsize=SMALL,
        color=QUIET,
        ha="right",
    )
    axes.grid(color=HAIRLINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel("time of a step, in seconds", fontsize=TEXT)
    axes.set_ylabel("memory of the fullest rank, in GB", fontsize=TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
