"""Rows of a pipeline in axes: boxes over idle time, messages between the rows, marks on top.

Row r covers y from r to r + 1 (downwards); its band, which holds the boxes, leaves a gutter for messages, and for
copies to host memory (below) and back (above). Boxes side by side share the height of the band.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from quintsched.files.terminal import percent
from quintsched.ir.instruction_set import Instruction, OffloadAct

from .house_style import DIGIT_EM, IDLE, IDLE_HATCH, QUIET, WAIT, WAIT_HATCH, WAIT_PATTERN, Rgb, ink_on, shade
from .instruction_colours import CARGO, look_of
from .timeline_objects import Arrow, ComputationBox, InstructionMark, Scene

GUTTER = 0.14
"""Fraction of a row that stays free above and below its band."""

MARK_POINTS = 6.0
MARK_STEP = 1.15 * MARK_POINTS
MESSAGES_PER_INCH = 26.0
"""Maximum density of messages between two rows; beyond it, none is drawn, to avoid clutter."""

SMALLEST_TEXT, LARGEST_TEXT = 4.6, 9.5
TEXT_PADDING = 1.2


@dataclass(frozen=True)
class PaperScale:
    """Scale of time and rows on paper; `tail` points after the makespan are kept free for marks."""

    points_per_time: float
    row_points: float
    tail: float
    chunks: int

    @property
    def band_points(self) -> float:
        """Height of a box, in points."""
        return self.row_points * (1 - 2 * GUTTER)


def tail_points(scenes: Iterable[Scene]) -> float:
    """Return the room for marks at the end of the time axis, in points."""
    return MARK_STEP * (0.5 + len({mark.what for scene in scenes for mark in scene.marks}))


def draw_rows(axes: Axes, scene: Scene, scale: PaperScale, font: float) -> None:
    """Draw a pipeline; `font` is the size of the row labels."""
    _draw_idle(axes, scene)
    if messages_shown(scene, scale):
        _draw_arrows(axes, scene, scale)
    _draw_waits(axes, scene)
    _draw_bars(axes, scene)
    _draw_boxes(axes, scene, scale)
    _draw_strips(axes, scene)
    _draw_numbers(axes, scene.boxes, scale)
    _draw_marks(axes, scene.marks, scale)
    _name_rows(axes, scene, scale, font)


def set_time_axis(axes: Axes, until: float, scale: PaperScale) -> None:
    """Set the time axis from 0 to `until`."""
    axes.set_xlim(0, until + scale.tail / scale.points_per_time)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def messages_shown(scene: Scene, scale: PaperScale) -> bool:
    """Return whether messages are few enough to be told apart, and rows high enough."""
    return bool(scene.arrows) and _crowding(scene, scale) <= MESSAGES_PER_INCH and scale.row_points >= 12


def _crowding(scene: Scene, scale: PaperScale) -> float:
    inches = scene.makespan * scale.points_per_time / 72
    return len(scene.arrows) / max(scene.ranks - 1, 1) / max(inches, 1.0)


def rectangle(x0: float, x1: float, y0: float, y1: float) -> list[tuple[float, float]]:
    """Return the corners of a rectangle."""
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def band(rank: int) -> tuple[float, float]:
    """Return the upper and lower end of a row's band."""
    return rank + GUTTER, rank + 1 - GUTTER


def _lane(box: ComputationBox) -> tuple[float, float]:
    """Return the upper and lower end of a box."""
    top, bottom = band(box.rank)
    height = (bottom - top) / box.lanes
    return top + box.lane * height, top + (box.lane + 1) * height


def _draw_idle(axes: Axes, scene: Scene) -> None:
    bands = [rectangle(0, scene.makespan, *band(rank)) for rank in range(scene.ranks)]
    axes.add_collection(
        PolyCollection(bands, facecolors=IDLE, edgecolors=IDLE_HATCH, linewidths=0, hatch="////", zorder=1),
        autolim=False,
    )


def _draw_waits(axes: Axes, scene: Scene) -> None:
    bands = [rectangle(wait.start, wait.end, *band(wait.rank)) for wait in scene.waits]
    if bands:
        drawn = PolyCollection(
            bands, facecolors=WAIT, edgecolors=WAIT_HATCH, linewidths=0, hatch=WAIT_PATTERN, zorder=2.5, gid="waits"
        )
        axes.add_collection(drawn, autolim=False)


def _draw_bars(axes: Axes, scene: Scene) -> None:
    if scene.bars:
        drawn = PolyCollection(
            [rectangle(bar.start, bar.end, *band(bar.rank)) for bar in scene.bars],
            facecolors=[shade(look_of(bar.what).colour, 1, 2) for bar in scene.bars],
            linewidths=0,
            zorder=3,
            gid="batch-work",
        )
        axes.add_collection(drawn, autolim=False)


def _draw_strips(axes: Axes, scene: Scene) -> None:
    if scene.strips:
        drawn = PolyCollection(
            [rectangle(s.start, s.end, *_gutter(s.rank, below=s.what is OffloadAct)) for s in scene.strips],
            facecolors=[look_of(strip.what).colour for strip in scene.strips],
            edgecolors="white",
            linewidths=0.4,
            zorder=3,
            gid="host-copies",
        )
        axes.add_collection(drawn, autolim=False)


def _gutter(rank: int, *, below: bool) -> tuple[float, float]:
    """Return the upper and lower end of the half of a gutter next to a row's band."""
    top, bottom = band(rank)
    return (bottom, bottom + 0.6 * GUTTER) if below else (top - 0.6 * GUTTER, top)


def _draw_boxes(axes: Axes, scene: Scene, scale: PaperScale) -> None:
    drawn = PolyCollection(
        [rectangle(box.start, box.end, *_lane(box)) for box in scene.boxes],
        facecolors=[_colour(box, scale) for box in scene.boxes],
        edgecolors="white",
        linewidths=[min(0.8, 0.1 * (box.end - box.start) * scale.points_per_time) for box in scene.boxes],
        zorder=3,
        gid="computations",
    )
    axes.add_collection(drawn, autolim=False)


def _draw_numbers(axes: Axes, boxes: Sequence[ComputationBox], scale: PaperScale) -> None:
    """Write the microbatch into every box that is wide enough, all in one size.

    A class of computations gets no numbers if most of its boxes are too narrow.
    """
    sizes = np.array([_size_that_fits(box, scale) for box in boxes])
    classes = np.array([look_of(type(box.instruction)).label for box in boxes])
    for label in set(classes):
        if np.median(sizes[classes == label]) < SMALLEST_TEXT:
            sizes[classes == label] = 0
    readable = sizes[sizes >= SMALLEST_TEXT]
    if not readable.size:
        return
    size = float(np.quantile(readable, 0.1))
    for box, fits in zip(boxes, sizes >= size, strict=True):
        if fits:
            colour = ink_on(_colour(box, scale))
            x, y = (box.start + box.end) / 2, sum(_lane(box)) / 2
            label = str(box.instruction.microbatch)
            axes.text(x, y, label, fontsize=size, color=colour, ha="center", va="center_baseline", zorder=4)


def _size_that_fits(box: ComputationBox, scale: PaperScale) -> float:
    """Return the largest text size in which the microbatch's number fits into its box."""
    digits = len(str(box.instruction.microbatch))
    room = (box.end - box.start) * scale.points_per_time - TEXT_PADDING
    height = min(0.62, 0.8 / box.lanes) * scale.band_points
    return min(room / (DIGIT_EM * digits), height, LARGEST_TEXT)


def _colour(box: ComputationBox, scale: PaperScale) -> Rgb:
    return shade(look_of(type(box.instruction)).colour, box.chunk, scale.chunks)


def _draw_arrows(axes: Axes, scene: Scene, scale: PaperScale) -> None:
    """Draw messages behind the boxes; downward ones are shifted a little to the left of upward ones."""
    crowding = _crowding(scene, scale) / MESSAGES_PER_INCH
    width, alpha = 1.0 - 0.5 * crowding, 0.95 - 0.5 * crowding
    ways: dict[bool, list[Arrow]] = defaultdict(list)
    for arrow in scene.arrows:
        ways[arrow.target > arrow.source].append(arrow)
    for down, arrows in ways.items():
        side = -1.1 if down else 1.1
        beside = axes.transData + ScaledTranslation(side / 72, 0, axes.figure.dpi_scale_trans)
        before = axes.transData + ScaledTranslation(side / 72, -1.3 * side / 72, axes.figure.dpi_scale_trans)
        tips = [(arrow.end, band(arrow.target)[0 if down else 1]) for arrow in arrows]
        tails = [(arrow.start, band(arrow.source)[1 if down else 0]) for arrow in arrows]
        colours = [CARGO[arrow.kind].colour for arrow in arrows]
        lines = LineCollection(
            list(zip(tails, tips, strict=True)), colors=colours, linewidths=width, alpha=alpha, zorder=2, gid="messages"
        )
        lines.set_transform(beside)
        axes.add_collection(lines, autolim=False)
        xs, ys = zip(*tips, strict=True)
        axes.scatter(
            xs,
            ys,
            marker="v" if down else "^",
            s=min(11.0, scale.row_points * 0.3),
            c=colours,
            linewidths=0,
            alpha=alpha,
            zorder=5,
            transform=before,
        )


def _draw_marks(axes: Axes, marks: Sequence[InstructionMark], scale: PaperScale) -> None:
    """Draw marks on the lower edges of the bands."""
    places: dict[type[Instruction], list[tuple[float, float]]] = defaultdict(list)
    for mark, x in _spread(marks, MARK_STEP / scale.points_per_time):
        places[mark.what].append((x, band(mark.rank)[1]))
    for what, xys in places.items():
        look = look_of(what)
        xs, ys = zip(*xys, strict=True)
        axes.scatter(
            xs,
            ys,
            marker=look.marker,
            s=MARK_POINTS**2 * (1.6 if look.marker == "*" else 0.8),
            c=look.colour,
            edgecolors="white",
            linewidths=0.5,
            zorder=6,
            clip_on=False,
        )


def _spread(marks: Sequence[InstructionMark], step: float) -> Iterator[tuple[InstructionMark, float]]:
    """Yield each mark with its x: its time, or a little later if it would hide a mark of another class."""
    rank, x, what = -1, 0.0, None
    for mark in sorted(marks, key=lambda mark: (mark.rank, mark.time)):
        crowded = mark.rank == rank and mark.what is not what
        x = max(mark.time, x + step) if crowded else mark.time
        rank, what = mark.rank, mark.what
        yield mark, x


def _name_rows(axes: Axes, scene: Scene, scale: PaperScale, font: float) -> None:
    """Label the rows at the left; at the right, write their notes or the fraction of time that each computes."""
    axes.set_ylim(scene.ranks, 0)
    every = max(1, round(font * 1.25 / scale.row_points + 0.49))
    ranks = range(0, scene.ranks, every)
    names = scene.names or tuple(f"rank {rank}" for rank in range(scene.ranks))
    axes.set_yticks([rank + 0.5 for rank in ranks], [names[rank] for rank in ranks], fontsize=font)
    axes.tick_params(axis="y", length=0)
    for rank in ranks:
        fraction = scene.busy[rank] / scene.makespan if scene.makespan else 0.0
        axes.annotate(
            scene.notes[rank] if scene.notes else f"{percent(fraction)} busy",
            (1, rank + 0.5),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=font * 0.9,
            color=QUIET,
            va="center_baseline",
        )
