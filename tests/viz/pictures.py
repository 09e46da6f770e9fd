"""Contents of a picture: texts and paths of an SVG, and texts with their places in a drawing."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from quintsched.viz.figure_sheet import PNG_DPI, Sheet

SVG = "{http://www.w3.org/2000/svg}"


def read_svg(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def texts_of(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def count_drawn(root: ElementTree.Element, gid: str) -> int:
    """The number of paths in the groups of this name."""
    groups = [g for g in root.iter(f"{SVG}g") if g.get("id") == gid]
    drawn = [e for g in groups for e in g.iter() if e.tag in (f"{SVG}path", f"{SVG}use")]
    templates = [e for g in groups for d in g.iter(f"{SVG}defs") for e in d.iter(f"{SVG}path")]
    return len(drawn) - len(templates)


def visible_texts(sheet: Sheet) -> Iterator[tuple[str, Bbox]]:
    """Every text of a drawing with its place in pixels, as in a PNG."""
    canvas = FigureCanvasAgg(sheet.figure)
    sheet.figure.set_dpi(PNG_DPI)
    sheet.arrange()
    canvas.draw()
    for axes in sheet.figure.axes:
        labels = [axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        for text in (*axes.texts, *labels):
            if text.get_visible() and text.get_text().strip() and (text in axes.texts or axes.axison):
                yield text.get_text(), text.get_window_extent()


def require_readable(sheet: Sheet) -> None:
    """Assert that no text of a drawing is cut off or on top of another; call it within the house style."""
    texts, paper = list(visible_texts(sheet)), sheet.figure.bbox
    assert len(texts) > 10
    for text, box in texts:
        assert 0 <= box.x0 <= box.x1 <= paper.width, text
        assert 0 <= box.y0 <= box.y1 <= paper.height, text
    for (one, a), (other, b) in combinations(texts, 2):
        assert a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1, (one, other)
