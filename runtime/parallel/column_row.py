"""What a column layer, the row layer behind it and a dropout between them know of each other.

tokens ──▶ column ──▶ [ between: this rank's shard of the features ] ──▶ row ──▶ tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..comm import Group


@dataclass
class ColumnRowPair:
    """The columns of one module and the rows behind them; in between each rank has its shard of the features.

    Column and row note whether a forward is between them, which a dropout there has to know: its mask is that of this
    rank's features. `columns` that take the same tokens let them enter once.
    """

    group: Group
    columns: int = 1
    is_between: bool = False
    is_gathered: bool = False
    """Whether sliced tokens were gathered where they entered the module, and the row has not sliced them yet."""
    _last: tuple[Tensor, Tensor] | None = None

    def enter(self, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `x` as columns take it: `how(x)`, or what that was for the column before if it took the same `x`."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, how(x))
        return self._last[1]

    def leave(self) -> None:
        """Note that a row has taken what the columns gave."""
        self.is_between = self.is_gathered = False
        self._last = None
