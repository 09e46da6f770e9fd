"""House style of pictures: colours, marks, fonts, and formats of numbers.

Colours are from the Okabe-Ito palette, distinct for all kinds of colour vision; a rank's chunks differ in lightness.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.style
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from .instruction_colours import INK

Rgb = tuple[float, float, float]

QUIET = "#5F6B7A"
HAIRLINE = "#C3CAD3"
IDLE = "#EEF0F3"
IDLE_HATCH = "#D3D8DF"
WAIT = "#F6F1FA"
WAIT_HATCH = "#C6B3D9"
WAIT_PATTERN = "\\\\\\\\\\\\"

DIGIT_EM = 0.64
"""Width of a digit in units of the font's size (DejaVu Sans: all digits are equally wide)."""


def shade(colour: str, chunk: int, chunks: int) -> Rgb:
    """Return the colour of one of `chunks` chunks: chunk 0 has the colour itself, later ones are lighter."""
    lightest = min(0.42 * (chunks - 1), 0.68)
    white = lightest * chunk / max(chunks - 1, 1)
    red, green, blue = to_rgb(colour)
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def ink_on(background: Rgb) -> str:
    """Return white or near black, whichever is easier to read on `background`."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background)
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.26 else INK


@contextmanager
def house_style() -> Iterator[None]:
    """Context with matplotlib's defaults and the house style; restores the caller's settings on exit."""
    ours = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        "text.parse_math": False,
        "text.color": INK,
        "axes.edgecolor": HAIRLINE,
        "axes.labelcolor": INK,
        "axes.linewidth": 0.8,
        "axes.unicode_minus": False,
        "hatch.linewidth": 0.5,
        "xtick.color": HAIRLINE,
        "ytick.color": HAIRLINE,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "svg.fonttype": "none",
        "svg.hashsalt": "quintsched",
    }
    with matplotlib.style.context(ours, after_reset=True):
        yield


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a line of text, in points."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    width, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width)


def printable(text: str) -> str:
    """Return `text` with characters replaced that cannot be printed (or be in an XML file)."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(value: float, unit: str) -> str:
    """Return a time with its unit."""
    unit = "forwards" if unit == "forward" and value != 1 else unit
    return f"{number(value)} {printable(unit)}"
