"""Legend: one key for every class of object in a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quintsched.ir.instruction_set import Instruction

from .figure_sheet import LegendKey
from .house_style import IDLE, IDLE_HATCH, WAIT, WAIT_HATCH, WAIT_PATTERN, ink_on, shade
from .instruction_colours import CARGO, LOOKS, Look, look_of
from .pipeline_rows import PaperScale, messages_shown
from .timeline_objects import Scene

MOST_SWATCHES = 8


def keys_of(scenes: Sequence[Scene], scale: PaperScale, size: float) -> list[LegendKey]:
    """Return the keys for the scenes; `size` is the size of the legend's text."""
    computations = _in_order({type(box.instruction) for scene in scenes for box in scene.boxes})
    marks = _in_order({mark.what for scene in scenes for mark in scene.marks})
    copies = _in_order({strip.what for scene in scenes for strip in scene.strips})
    waits = any(scene.waits for scene in scenes)
    cargo = {arrow.kind for scene in scenes if messages_shown(scene, scale) for arrow in scene.arrows}
    return [
        *(_box_key(look_of(what), scale.chunks, size) for what in computations),
        LegendKey("idle", size * 1.6, _hatched(size, IDLE, IDLE_HATCH, "////")),
        *([LegendKey("waiting", size * 1.6, _hatched(size, WAIT, WAIT_HATCH, WAIT_PATTERN))] if waits else []),
        *(_arrow_key(look, size) for kind, look in CARGO.items() if kind in cargo),
        *(_strip_key(look_of(what), size) for what in copies),
        *(_mark_key(look_of(what), size) for what in marks),
    ]


def _in_order(classes: Iterable[type[Instruction]]) -> list[type[Instruction]]:
    known = list(LOOKS)
    return sorted(classes, key=lambda what: (known.index(what) if what in known else len(known), what.__name__))


def _box_key(look: Look, chunks: int, size: float) -> LegendKey:
    """Return a key with one numbered swatch per chunk; for many chunks, only some."""
    shown = range(chunks) if chunks <= MOST_SWATCHES else [k * (chunks - 1) // 3 for k in range(4)]
    side = size * (1.6 if chunks <= 10 else 0.65 * len(str(chunks)) + 0.6)

    def draw(axes: Axes, x: float, y: float) -> None:
        for place, chunk in enumerate(shown):
            colour = shade(look.colour, chunk, chunks)
            corner = (x + place * side, y - size * 0.6)
            axes.add_patch(Rectangle(corner, side, size * 1.2, facecolor=colour, edgecolor="white", linewidth=0.8))
            if chunks > 1:
                middle = x + (place + 0.5) * side
                axes.text(
                    middle, y, str(chunk), fontsize=size * 0.8, color=ink_on(colour), ha="center", va="center_baseline"
                )

    return LegendKey(f"{look.label} of chunk" if chunks > 1 else look.label, side * len(shown), draw)


def _hatched(size: float, colour: str, hatch_colour: str, pattern: str) -> Callable[[Axes, float, float], None]:
    def draw(axes: Axes, x: float, y: float) -> None:
        corner = (x, y - size * 0.6)
        swatch = Rectangle(corner, size * 1.6, size * 1.2, facecolor=colour, edgecolor=hatch_colour, hatch=pattern)
        swatch.set_linewidth(0)
        axes.add_patch(swatch)

    return draw


def _arrow_key(look: Look, size: float) -> LegendKey:
    def draw(axes: Axes, x: float, y: float) -> None:
        axes.plot((x, x + size * 1.6), (y, y), color=look.colour, linewidth=1.0)
        axes.plot((x + size * 1.6,), (y,), color=look.colour, marker=">", markersize=3.5, linestyle="none")

    return LegendKey(look.label, size * 1.8, draw)


def _strip_key(look: Look, size: float) -> LegendKey:
    def draw(axes: Axes, x: float, y: float) -> None:
        axes.add_patch(Rectangle((x, y - size * 0.2), size * 1.6, size * 0.4, facecolor=look.colour, linewidth=0))

    return LegendKey(look.label, size * 1.6, draw)


def _mark_key(look: Look, size: float) -> LegendKey:
    def draw(axes: Axes, x: float, y: float) -> None:
        larger = 1.3 if look.marker == "*" else 1.0
        axes.plot(
            (x + size * 0.5,),
            (y,),
            color=look.colour,
            marker=look.marker,
            markersize=size * 0.6 * larger,
            linestyle="none",
        )

    return LegendKey(look.label, size, draw)
