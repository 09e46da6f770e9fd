"""Sheet of paper: blocks below each other, sized in inches, saved as PNG or SVG.

    sheet = Sheet(width=9.0, left=0.6, right=0.8)
    sheet.line(…)           text across the sheet
    axes = sheet.block(2.0) axes between the margins
    sheet.write_picture(path)

Sizes are explicit, never computed by a layout engine, so that nothing overlaps and equal inputs give identical bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from quintsched.errors import UsageError
from quintsched.files.atomic import write_whole

from .house_style import text_width
from .instruction_colours import INK

POINTS = 72.0
SUFFIXES = (".png", ".svg")
PNG_DPI = 144


@dataclass(frozen=True)
class LegendKey:
    """Entry of the legend; `draw(axes, x, y)` draws it `width` points wide from x on, vertically centred at y."""

    label: str
    width: float
    draw: Callable[[Axes, float, float], None]


class Sheet:
    """Figure that grows downwards."""

    def __init__(self, width: float, left: float, right: float, font_scale: float = 1.0) -> None:
        self.width, self.left, self.right, self.font_scale = width, left, right, font_scale
        self.figure = Figure(figsize=(width, 1.0))
        self._blocks: list[tuple[Axes, float, float]] = []
        self._height = 0.0

    @property
    def inner_width(self) -> float:
        """Width between the margins, in points."""
        return (self.width - self.left - self.right) * POINTS

    @property
    def _text_width(self) -> float:
        """Width available for text, which includes most of the right margin, in points."""
        return self.inner_width + self.right * POINTS * 0.85

    def space(self, height: float) -> None:
        """Leave `height` inches empty."""
        self._height += height

    def block(self, height: float) -> Axes:
        """Return empty axes of `height` inches between the margins."""
        axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0), label=str(len(self._blocks)))
        self._blocks.append((axes, self._height, height))
        self._height += height
        return axes

    def paper(self, height_points: float) -> Axes:
        """Return a block to write on, with coordinates in points from its left and upper edge."""
        axes = self.block(height_points / POINTS)
        axes.set_axis_off()
        axes.set_xlim(0, self.inner_width)
        axes.set_ylim(height_points, 0)
        return axes

    def fit_text(self, text: str, size: float, *, bold: bool = False) -> float:
        """Return the size of a line of text: `size` at the sheet's scale, or smaller to fit."""
        size *= self.font_scale
        return min(size, size * self._text_width / text_width(text, size, bold=bold))

    def line(self, text: str, size: float, *, bold: bool = False, colour: str = INK) -> None:
        """Write one line of text from the left margin, smaller if it would not fit."""
        size = self.fit_text(text, size, bold=bold)
        paper = self.paper(size * 1.5)
        weight = "bold" if bold else "normal"
        paper.text(0, size * 1.1, text, fontsize=size, fontweight=weight, color=colour, va="baseline")

    def legend(self, keys: Sequence[LegendKey], size: float) -> None:
        """Write the keys from left to right, in as many lines as needed."""
        size *= self.font_scale
        gaps = [size * 0.6 if key.width else 0.0 for key in keys]
        widths = [key.width + gap + text_width(key.label, size) for key, gap in zip(keys, gaps, strict=True)]
        places = _flow(widths, size * 1.9, self._text_width)
        line_height = size * 1.9
        paper = self.paper((places[-1][0] + 1) * line_height)
        for key, gap, (line, x) in zip(keys, gaps, places, strict=True):
            y = (line + 0.5) * line_height
            key.draw(paper, x, y)
            paper.text(x + key.width + gap, y, key.label, fontsize=size, va="center_baseline")
        for artist in paper.get_children():
            artist.set_clip_on(False)

    def arrange(self) -> None:
        """Set the height of the figure and the positions of the blocks."""
        self.figure.set_size_inches(self.width, self._height)
        inner = (self.width - self.left - self.right) / self.width
        for axes, top, height in self._blocks:
            bottom = 1 - (top + height) / self._height
            axes.set_position((self.left / self.width, bottom, inner, height / self._height))

    def write_picture(self, path: Path) -> None:
        """Write the sheet; raises `UsageError` on failure."""
        self.arrange()
        write_whole(path, self._png() if path.suffix.lower() == ".png" else self._svg(), "the picture")

    def part(self) -> str:
        """Return the sheet as a part of an HTML page; it scales with the window."""
        self.arrange()
        text = self._svg().decode("utf-8")
        return text[text.index("<svg") :].strip()

    def _svg(self) -> bytes:
        picture = io.BytesIO()
        FigureCanvasSVG(self.figure).print_svg(picture, metadata={"Date": None})
        return picture.getvalue()

    def _png(self) -> bytes:
        picture = io.BytesIO()
        self.figure.set_dpi(PNG_DPI)
        FigureCanvasAgg(self.figure).print_png(picture, metadata={"Software": None})
        return picture.getvalue()


def check_suffix(path: Path, *others: str) -> None:
    """Raise `UsageError` for a file name with a suffix that is neither a picture's nor one of `others`."""
    *first, last = *SUFFIXES, *others
    if path.suffix.lower() not in (*first, last):
        known = f"{', '.join(first)} or {last}"
        raise UsageError(f"{path}: cannot draw a {path.suffix or 'nameless'} file; end the name in {known}")


def _flow(widths: Sequence[float], space: float, room: float) -> list[tuple[int, float]]:
    """Return (line, x) for each width, in as few lines as `room` allows, of about equal length."""
    places = _break_lines(widths, space, room)
    while (narrower := _break_lines(widths, space, room * 0.95))[-1][0] == places[-1][0] and room > max(widths):
        places, room = narrower, room * 0.95
    return places


def _break_lines(widths: Sequence[float], space: float, room: float) -> list[tuple[int, float]]:
    places: list[tuple[int, float]] = []
    line, x = 0, 0.0
    for width in widths:
        if x and x + width > room:
            line, x = line + 1, 0.0
        places.append((line, x))
        x += width + space
    return places
