"""Panel of bars: where the time of each rank goes, computing first, then idle time by its cause, on the time axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quintsched.files.terminal import percent
from quintsched.simulation.idle_time import CAUSES, TimeOfRank

from .figure_sheet import POINTS, LegendKey
from .house_style import QUIET
from .instruction_colours import CAUSE_COLOURS, WORKING_COLOURS

COLOURS = {**WORKING_COLOURS, **CAUSE_COLOURS}
MOST_LABELLED = 24
"""Most ranks with a label each."""


def idle_height(ranks: int, font: float) -> float:
    """Return the height of the panel in inches."""
    return float(np.clip(font * 1.5 / POINTS * ranks, 0.3, 3.0))


def idle_keys(times: Sequence[TimeOfRank], makespan: float, size: float) -> list[LegendKey]:
    """Return the legend: each part that some rank has, with its share of all ranks' time."""
    whole = makespan * len(times)
    shares = {name: sum(time.parts.get(name, 0.0) for time in times) / whole for name in (*COLOURS, *CAUSES)}
    return [_key(f"{name} {percent(share)}", COLOURS[name], size) for name, share in shares.items() if share > 0]


def _key(label: str, colour: str, size: float) -> LegendKey:
    def draw(axes: Axes, x: float, y: float) -> None:
        axes.add_patch(Rectangle((x, y - size * 0.45), size * 1.2, size * 0.9, facecolor=colour, linewidth=0))

    return LegendKey(label, size * 1.2, draw)


def draw_idle(axes: Axes, times: Sequence[TimeOfRank], font: float) -> None:
    """Draw the bars, from time 0 to the makespan, and at the right for whom each rank waits most."""
    every = -(-len(times) // MOST_LABELLED)
    rows, lefts = [time.rank for time in times], np.zeros(len(times))
    for name, colour in COLOURS.items():
        widths = np.array([time.parts.get(name, 0.0) for time in times])
        axes.barh(rows, widths, left=lefts, height=0.82, color=colour, linewidth=0, gid=f"idle {name}")
        lefts = lefts + widths
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_yticks(
        range(0, len(times), every), [f"rank {rank}" for rank in range(0, len(times), every)], fontsize=font
    )
    axes.tick_params(axis="y", length=0)
    for time in times[::every]:
        if time.waits:
            rank = next(iter(time.waits))
            axes.annotate(
                f"waits for rank {rank}",
                (1, time.rank),
                xycoords=("axes fraction", "data"),
                xytext=(5, 0),
                textcoords="offset points",
                fontsize=font * 0.9,
                color=QUIET,
                va="center_baseline",
                annotation_clip=False,
            )
