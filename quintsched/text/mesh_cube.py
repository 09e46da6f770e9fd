"""A mesh of up to three axes as a cube in text: the innermost axis to the right, the next down, the outermost back.

    dp=2,pp=2,tp=2

          4 ─────── 5          → tp   ↓ pp   ↗ dp
        ╱ │       ╱ │
      0 ──┼──── 1   │
      │   │     │   │
      │   6 ────┼── 7
      │ ╱       │ ╱
      2 ─────── 3

Axes of one rank are left out. A cube that is too wide is drawn as tables of ranks, one for each place on the outermost
axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintsched.ir.mesh import Mesh

MOST_AXES = 3
MOST_CUBE_RANKS = 512
WIDEST = 100
"""Columns of a cube."""
BACK, UP = 4, 2
"""Columns and lines by which a rank is displaced from the one in front of it."""


def mesh_cube(mesh: Mesh) -> list[str]:
    """Return the lines of the drawing; none for more than three axes, or more ranks than people look at."""
    axes = mesh.without_ones.axes
    if not 1 <= len(axes) <= MOST_AXES or mesh.size > MOST_CUBE_RANKS:
        return []
    names = ["", "", *(name for name, _ in axes)][-3:]
    depth, rows, columns = [1, 1, *(size for _, size in axes)][-3:]
    directions = "   ".join(f"{arrow} {name}" for arrow, name in zip("→↓↗", reversed(names), strict=True) if name)
    cube = _Cube(depth, rows, columns)
    drawn = cube.lines() if cube.width <= WIDEST else [*_tables(names, depth, rows, columns)]
    return [*drawn, "", directions]


class _Cube:
    """A canvas with the ranks of `depth` × `rows` × `columns`, numbered in this order, and edges between neighbours."""

    def __init__(self, depth: int, rows: int, columns: int) -> None:
        self._sizes = (depth, rows, columns)
        self._digits = len(str(depth * rows * columns - 1))
        self._across = BACK * (depth - 1) + self._digits + 5
        self._down = UP * depth if depth > 1 else UP
        self.width = (columns - 1) * self._across + BACK * (depth - 1) + self._digits

    def lines(self) -> list[str]:
        """Draw it from the back to the front, so that what is in front covers what is behind."""
        depth, rows, columns = self._sizes
        canvas = [[" "] * self.width for _ in range((rows - 1) * self._down + UP * (depth - 1) + 1)]
        for layer in reversed(range(depth)):
            for row in range(rows):
                for column in range(columns):
                    self._draw_edges(canvas, layer, row, column)
            for row in range(rows):
                for column in range(columns):
                    x, y = self._place(layer, row, column)
                    rank = (layer * rows + row) * columns + column
                    canvas[y][x : x + self._digits] = f"{rank:<{self._digits}}"
        return ["".join(line).rstrip() for line in canvas]

    def _place(self, layer: int, row: int, column: int) -> tuple[int, int]:
        depth = self._sizes[0]
        return column * self._across + layer * BACK, row * self._down + (depth - 1 - layer) * UP

    def _draw_edges(self, canvas: list[list[str]], layer: int, row: int, column: int) -> None:
        """Draw the edges to the next rank on each axis."""
        (x, y), (depth, rows, columns) = self._place(layer, row, column), self._sizes
        if column + 1 < columns:
            for at in range(x + self._digits + 1, x + self._across - 1):
                _put(canvas, at, y, "─", crossing="│")
        if row + 1 < rows:
            for at in range(y + 1, y + self._down):
                _put(canvas, x, at, "│", crossing="─")
        if layer + 1 < depth:
            _put(canvas, x + BACK // 2, y - UP // 2, "╱")


def _put(canvas: list[list[str]], x: int, y: int, line: str, crossing: str = "") -> None:
    canvas[y][x] = "┼" if canvas[y][x] == crossing else line


def _tables(names: Sequence[str], depth: int, rows: int, columns: int) -> Iterator[str]:
    """Yield a table of ranks for each place on the outermost axis."""
    width = len(str(depth * rows * columns - 1))
    for layer in range(depth):
        if names[0]:
            yield f"{names[0]}={layer}"
        for row in range(rows):
            first = (layer * rows + row) * columns
            yield "  " + " ".join(f"{rank:>{width}}" for rank in range(first, first + columns))
