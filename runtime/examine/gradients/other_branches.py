"""Mode that replaces a Python value that user code reads from a tensor, to run the other branch.

    if x.abs().max() > 20: h.register_hook(clamp)      no       once as if it were: a backward that clamps
    self.log = float(h.norm())                         1.7      once as if it were 1000000.0: the same backward

Data of later steps may take that branch, which a few drawn samples need not reach.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from ...objects.library_or_user import is_library_module
from ..block_runs import SameDraws

MOST_ASKED = 16
_ASKING = frozenset({"item", "__bool__", "__int__", "__float__", "__index__"})
_LARGE = 1e6


class OtherAnswers(TorchFunctionMode):
    """Mode that changes the value of the read at `place`, counted from 1; 0: of none.

    Attributes:
        count: number of reads by user code.
    """

    def __init__(self, place: int = 0) -> None:
        super().__init__()
        self._place, self.count = place, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and count it where it returns a Python value of a tensor to user code."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _ASKING or isinstance(result, complex):
            return result
        if is_library_module(str(sys._getframe(1).f_globals.get("__name__", ""))):
            return result
        self.count += 1
        return _other(result) if self.count == self._place else result


def answered(alike: SameDraws, answers: OtherAnswers) -> SameDraws:
    """Return `alike` with the mode entered as well, its count reset each time."""

    @contextmanager
    def within(samples: range) -> Iterator[None]:
        answers.count = 0
        with alike(samples), answers:
            yield

    return within


def _other(answer: bool | int | float) -> bool | int | float:
    if isinstance(answer, float):
        return _LARGE if abs(answer) < _LARGE / 2 else 0.0
    return type(answer)(not answer)
