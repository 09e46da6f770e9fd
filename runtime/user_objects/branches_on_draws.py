"""Detection of code that reads random draws as Python values, and so may branch differently under another seed.

if random.random() < p: …           Python's generator has moved, numpy's likewise
if torch.rand(1).item() < p: …      a drawn tensor, or one computed from it, is read as a number
x = x + torch.randn_like(x)         nothing: the draw stays a tensor
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ASKING = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__"})
"""Methods of tensors that return their numbers to Python."""


class _Draws(TorchDispatchMode):
    """Mode that detects draws from torch's generators since `has_drawn` was reset, and in-place writes, in this thread.

    Attributes:
        written: storages of tensors that were changed in place; held, so that their ids are not reused.
    """

    has_drawn = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        given = {**dict(enumerate(args)), **(kwargs or {})}
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                changed = given.get(place, given.get(argument.name))
                self.note_written(leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))

    def note_written(self, tensors: Iterable[Tensor]) -> None:
        """Record that tensors were changed in place."""
        self.written.update({memory_of(tensor): tensor.untyped_storage() for tensor in tensors})


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors of one storage, while one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


class DrawnValues(TorchFunctionMode):
    """Mode that detects Python values read from random draws.

    Attributes:
        reached: the call that read a Python value of a draw, in words; None: there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached: str | None = None
        self._drawn: dict[int, Tensor] = {}
        self._draws = _Draws()
        self._is_ours = self._has_moved = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record draws, and tensors computed from them."""
        kwargs = kwargs or {}
        if self._is_ours:
            return func(*args, **kwargs)
        self._draws.has_drawn = False
        if getattr(func, "__name__", "") == "__set__":  # x.data = …
            self._draws.note_written(args[:1])
        with self._draws:
            result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if (
            self._draws.has_drawn
            or kwargs.get("generator") is not None
            or any(id(tensor) in self._drawn for tensor in given)
        ):
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self._drawn.update({id(tensor): tensor for tensor in made})
            name = getattr(func, "__name__", "")
            if name in _ASKING:
                self.reached = self.reached or f"a tensor that was drawn is asked for its number ({name})"
        return result

    @property
    def written(self) -> Collection[int]:
        """Storages of tensors that were changed in place, see `memory_of`."""
        return self._draws.written

    @contextmanager
    def within(self, *, counts: bool = True) -> Iterator[None]:
        """Context for a module that is called whole: draws of its own code from Python's generators do not count.

        With `counts`, tensors that it draws are recorded: it may return them.
        """
        before, self._is_ours = self._is_ours, not counts
        others, now = (random.getstate(), np.random.get_state()), self._of_python()
        try:
            yield
        finally:
            self._is_ours = before
            self._has_moved = self._of_python() != now
            random.setstate(others[0])
            np.random.set_state(others[1])

    def returned(self, result: Any) -> None:
        """Record the return value of the last module that was called whole."""
        if self._has_moved and any(isinstance(leaf, int | float) for leaf in tree_leaves(result)):
            self.reached = self.reached or "Python's random or numpy's is asked for a number"

    def __enter__(self) -> DrawnValues:
        self._others = self._of_python()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._of_python() != self._others:
            self.reached = self.reached or "Python's random or numpy's is asked for a number"

    def _of_python(self) -> str:
        return repr((random.getstate(), np.random.get_state()))
