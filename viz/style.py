"""House style of pictures: colours, marks, fonts, and formats of numbers.

Colours are from the Okabe-Ito palette, distinct for all kinds of colour vision; a rank's chunks differ in lightness.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib.style
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from quintsched.ir.dataflow import ValueKind
from quintsched.ir.instruction_set import (
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    FetchAct,
    FreeParams,
    Fwd,
    GatherParams,
    Instruction,
    OffloadAct,
    OptStep,
    Recompute,
    ReduceScatterBucket,
    ShareMetrics,
    SyncTied,
)

from .collective_scene import Added, Stored

Rgb = tuple[float, float, float]

INK = "#1F2933"
QUIET = "#5F6B7A"
HAIRLINE = "#C3CAD3"
IDLE = "#EEF0F3"
IDLE_HATCH = "#D3D8DF"
WAIT = "#F6F1FA"
WAIT_HATCH = "#C6B3D9"
WAIT_PATTERN = "\\\\\\\\\\\\"

DIGIT_EM = 0.64
"""Width of a digit in units of the font's size (DejaVu Sans: all digits are equally wide)."""


@dataclass(frozen=True)
class Look:
    """Style of one class of instruction or value."""

    label: str
    colour: str
    marker: str = "s"


LOOKS: dict[type[Instruction], Look] = {
    Fwd: Look("forward", "#0072B2"),
    Bwd: Look("backward", "#D55E00"),
    BwdInput: Look("input gradient", "#E69F00"),
    BwdWeight: Look("weight gradient", "#009E73"),
    Recompute: Look("recomputation", "#8C6BB1"),
    Added: Look("chunk arrives and is added", "#0072B2"),
    Stored: Look("chunk arrives and is stored", "#E69F00"),
    SyncTied: Look("tied gradients added up", "#000000", "s"),
    AllReduceBucket: Look("gradients reduced", "#009E73", "D"),
    ReduceScatterBucket: Look("gradients reduced, shards kept", "#009E73", "d"),
    OffloadAct: Look("activations to the host", "#7A5195", "<"),
    FetchAct: Look("activations fetched", "#2F7F86", "p"),
    GatherParams: Look("weights gathered", "#882255", "^"),
    FreeParams: Look("weights dropped", "#C48AA5", ">"),
    ShareMetrics: Look("metrics shared", "#CC79A7", "o"),
    ClipGrad: Look("global norm", "#56B4E9", "v"),
    OptStep: Look("optimizer step", INK, "*"),
    AllGatherBucket: Look("stepped weights gathered", "#882255", "P"),
}
"""Styles in the order of legends; other classes are shown in grey, with their class name."""

CARGO: dict[ValueKind, Look] = {
    ValueKind.OUTPUT: Look("activation sent", "#2B6C99"),
    ValueKind.OUTPUT_GRAD: Look("gradient sent", "#B3541E"),
    ValueKind.SKIP: Look("skip sent", "#5AA6D6"),
    ValueKind.SKIP_GRAD: Look("gradient of a skip sent", "#E3A27B"),
}


def look_of(what: type[Instruction]) -> Look:
    """Return the style of a class of instruction."""
    return LOOKS.get(what) or Look(what.__name__, "#7A7A7A")


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


def percent(fraction: float) -> str:
    """Return a fraction as per cent."""
    return f"{100 * fraction:.1f} %"
