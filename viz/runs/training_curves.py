"""Picture of training runs: a panel for each figure of their logs over the steps, a colour for each run.

loss │ ╲╲___      ●   line: training, points: validation
     └───────────▶ step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from quintsched.errors import UsageError
from quintsched.trace.training_log import TrainingLog

from ..figure_sheet import LegendKey, Sheet, check_suffix
from ..house_style import HAIRLINE, QUIET, house_style, printable

WIDTH, LOSS_HEIGHT, HEIGHT = 9.0, 2.6, 1.1
TEXT, TITLE, SMALL = 9.0, 13.0, 8.0
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F6B7A")
STROKES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Strokes of the lines: another one each time that all colours are taken."""
PANELS = {
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
    "samples_per_s": "samples per second",
    "bubble": "bubble, share of time",
    "memory_gb": "memory of the fullest rank, GB",
}
"""Figures below the loss, in order, with what they are."""
VALIDATED = ("epoch", "evaluation")


def render_training(logs: Sequence[TrainingLog], path: Path) -> None:
    """Draw the logs of runs into a `.png` or `.svg` file; equal logs give identical bytes.

    Raises `UsageError` for another suffix, a path that cannot be written, and logs without a step.
    """
    check_suffix(path)
    if not any(log.series("loss")[0] for log in logs):
        raise UsageError(f"{path}: there is nothing to draw: no run has logged a step with a finite loss")
    with house_style():
        draw_training(logs).write_picture(path)


def draw_training(logs: Sequence[TrainingLog]) -> Sheet:
    """Return a drawing of the logs, in the current style."""
    sheet = Sheet(width=WIDTH, left=0.75, right=0.3)
    sheet.space(0.1)
    sheet.line(printable(", ".join(log.name for log in logs)), TITLE, bold=True)
    for plan in dict.fromkeys(log.plan for log in logs if log.plan):
        sheet.line(printable(plan), TEXT, colour=QUIET)
    if len(logs) > 1:
        sheet.legend([_key(log.name, number) for number, log in enumerate(logs)], TEXT)
    sheet.space(0.08)
    sheet.line("loss; points: validation", TEXT, colour=QUIET)
    axes = sheet.block(LOSS_HEIGHT)
    _lines(axes, logs, "loss")
    for number, log in enumerate(logs):
        steps, losses = log.series("validation_loss", VALIDATED)
        axes.plot(steps, losses, "o", markersize=4, color=_look(number)["color"], zorder=3, gid=f"validation {number}")
    _style(axes, last=False)
    first, last = axes.get_xlim()
    until = (first, last) if last - first >= 1 else (first - 1, last + 1)
    axes.set_xlim(until)
    shown = [*_shown(logs)]
    for figure in shown:
        sheet.space(0.12)
        sheet.line(PANELS[figure], TEXT, colour=QUIET)
        axes = sheet.block(HEIGHT)
        _lines(axes, logs, figure)
        axes.set_xlim(until)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
        _style(axes, last=figure == shown[-1])
    sheet.space(0.55)
    return sheet


def _shown(logs: Sequence[TrainingLog]) -> Iterator[str]:
    """Yield the figures that some log has; samples only where there are no tokens."""
    for figure in PANELS:
        there = any(log.series(figure)[0] for log in logs)
        if there and not (figure == "samples_per_s" and any(log.series("tokens_per_s")[0] for log in logs)):
            yield figure


def _lines(axes: Axes, logs: Sequence[TrainingLog], figure: str) -> None:
    for number, log in enumerate(logs):
        steps, values = log.series(figure)
        marker = "." if len(steps) == 1 else ""
        axes.plot(steps, values, marker=marker, linewidth=1.3, gid=f"{figure} {number}", **_look(number))


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STROKES[number // len(COLOURS) % len(STROKES)]}


def _key(name: str, number: int) -> LegendKey:
    def draw(axes: Axes, x: float, y: float) -> None:
        axes.plot([x, x + 20], [y, y], linewidth=2, **_look(number))

    return LegendKey(printable(name), 20.0, draw)


def _style(axes: Axes, *, last: bool) -> None:
    axes.grid(color=HAIRLINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL, labelbottom=last)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
    if last:
        axes.set_xlabel("optimizer step", fontsize=TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
