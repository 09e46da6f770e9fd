"""Memory panel: activations that each rank holds over time.

Few ranks are drawn as step lines, labelled at the right with their peaks; many ranks as the rows of a heat map.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import ColorType

from quintsched.simulation.held_activations import HeldActivations

from .figure_sheet import LegendKey
from .house_style import HAIRLINE, QUIET, number, text_width

MOST_LINES = 6
LINE_COLOURS = "viridis"
HEAT_COLOURS = "BuPu"


def held_height(ranks: int, font: float) -> float:
    """Return the height of the panel in inches."""
    if ranks <= MOST_LINES:
        return 1.7 * font / 9
    return float(np.clip(font * 1.1 / 72 * ranks, 1.7, 3.6))


def held_key(held: Sequence[HeldActivations], size: float) -> LegendKey:
    """Return the panel's heading; for a heat map it begins with the colour scale."""
    what = "activations held, in microbatches of a whole rank"
    if len(held) <= MOST_LINES:
        return LegendKey(what, 0.0, lambda axes, x, y: None)
    most = max(of_rank.peak for of_rank in held)

    def draw(axes: Axes, x: float, y: float) -> None:
        across = np.linspace(x + size, x + size * 9, 65)
        ramp = np.linspace(0, 1, 64)[None, :]
        axes.pcolormesh(across, [y - size * 0.5, y + size * 0.5], ramp, cmap=HEAT_COLOURS)
        axes.text(x, y, "0", fontsize=size, va="center_baseline")
        axes.text(x + size * 9.4, y, number(most), fontsize=size, va="center_baseline")

    return LegendKey(what, size * 10.2 + text_width(number(most), size), draw)


def draw_held(axes: Axes, held: Sequence[HeldActivations], until: float, font: float, height_points: float) -> None:
    """Draw the activations of each rank from time 0 to `until`; `height_points` is the height of the axes."""
    if len(held) <= MOST_LINES:
        _draw_lines(axes, held, until, font, height_points)
    else:
        _draw_heat(axes, held, until, font, height_points)


def _draw_lines(axes: Axes, held: Sequence[HeldActivations], until: float, font: float, height_points: float) -> None:
    most = max(of_rank.peak for of_rank in held)
    colours = matplotlib.colormaps[LINE_COLOURS](np.linspace(0.0, 0.8, len(held)))
    for rank, (of_rank, colour) in enumerate(zip(held, colours, strict=True)):
        thick = 2.2 - 1.1 * rank / max(len(held) - 1, 1)
        axes.plot(
            (*of_rank.times, until),
            (*of_rank.amounts, of_rank.amounts[-1]),
            drawstyle="steps-post",
            color=colour,
            linewidth=thick,
            solid_joinstyle="miter",
            zorder=2 + rank / 100,
            gid=f"held-{rank}",
        )
    axes.set_ylim(0, most * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="y", labelsize=font)
    axes.grid(axis="y", color=HAIRLINE, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    step = min(font * 1.45, height_points / len(held))
    for rank, (of_rank, colour) in enumerate(zip(held, colours, strict=True)):
        y = height_points - step * (rank + 0.5)
        _write(axes, f"rank {of_rank.rank}: peak {number(of_rank.peak)}", y, font * 0.9, colour)


def _draw_heat(axes: Axes, held: Sequence[HeldActivations], until: float, font: float, height_points: float) -> None:
    most = max(of_rank.peak for of_rank in held)
    cells, amounts = [], []
    for rank, of_rank in enumerate(held):
        for start, end, amount in zip(of_rank.times, (*of_rank.times[1:], until), of_rank.amounts, strict=True):
            cells.append([(start, rank), (end, rank), (end, rank + 1), (start, rank + 1)])
            amounts.append(amount)
    drawn = PolyCollection(
        cells, array=amounts, cmap=HEAT_COLOURS, norm=Normalize(0, most), linewidths=0, antialiaseds=False, gid="held"
    )
    axes.add_collection(drawn, autolim=False)
    axes.set_ylim(len(held), 0)
    row = height_points / len(held)
    every = max(1, round(font * 1.05 / row + 0.49))
    ranks = range(0, len(held), every)
    axes.set_yticks([rank + 0.5 for rank in ranks], [f"rank {held[rank].rank}" for rank in ranks], fontsize=font * 0.9)
    axes.tick_params(axis="y", length=0)
    for rank in ranks:
        _write(axes, f"peak {number(held[rank].peak)}", height_points - row * (rank + 0.5), font * 0.9, QUIET)


def _write(axes: Axes, text: str, y_points: float, size: float, colour: ColorType) -> None:
    """Write at the right of the axes, `y_points` above their lower edge."""
    axes.annotate(
        text,
        (1, 0),
        xycoords="axes fraction",
        xytext=(5, y_points),
        textcoords="offset points",
        fontsize=size,
        color=colour,
        va="center_baseline",
        annotation_clip=False,
    )
