"""The region between a column layer and its row layer, where each rank has a share of the features.

    tokens ──▶ column ──▶ [ region: open ] ──▶ row ──▶ tokens

Column and row note whether a forward is inside; what stands there and has to know (a dropout, whose mask belongs to
this rank's features) looks it up. Several columns that take the same tokens let them enter once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...comm import Group


@dataclass
class Region:
    """The region of one module's `columns` and rows on this rank, cut over `group`."""

    group: Group
    columns: int = 1
    is_open: bool = False
    _last: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `x` as columns take it: `how(x)`, or what that was for the column before if it took the same `x`."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, how(x))
        return self._last[1]

    def leave(self) -> None:
        """Note that a row has taken what the columns gave."""
        self.is_open = False
        self._last = None
