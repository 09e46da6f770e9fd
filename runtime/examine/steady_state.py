"""Whether what code keeps on the host depends on how often it has run, or on the numbers that it was given.

self.mask = causal(length)          the same after every run of these shapes: whoever runs it has it
self.calls += 1                     another after each run: refused
self.last = x.detach()              another for other numbers, or unknown: refused
self.seen = True                    a flag that the first run sets: refused, for one who asks for it sees another
self.means[0].add_(x.mean())        tensors as well, however they are written, and wherever they are
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..objects.snapshot import Change, Snapshot
from ..objects.user_code import PLAIN
from .asks_elsewhere import require_plain, unheard
from .drawn_values import DrawnValues
from .followed import line_in

_DEEPEST = 8

Place = tuple[int, Any]


class HostChanges:
    """What code of a model changes on the host, apart from what the modules that it calls change themselves.

    Args:
        root: the model, or a copy of it, in which the code runs.
        apart: modules whose attributes do not count, as a library's own code sets them.
    """

    def __init__(self, root: nn.Module, apart: Iterable[nn.Module] = ()) -> None:
        self._root = root
        self._before = Snapshot({"model": root})
        self._others: set[Place] = set()
        self._theirs = {id(held) for m in apart for held in (vars(m), m._parameters, m._buffers, m._modules)}

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """A context in which a module runs that has state of its own."""
        before = Snapshot({"": module})
        try:
            yield
        finally:
            self._others |= {change.place for change in before.changes()}

    def found(self) -> list[Change]:
        """Return the changes since the start."""
        return [change for change in self._before.changes() if self._counts(change)]

    def first(self) -> str | None:
        """Return the name and the line of the first change; None: there is none."""
        return next((self._named(change.name) for change in self.found()), None)

    def unsteady(self, run: Callable[[], object], again: Callable[[], object]) -> str | None:
        """Return the name and the line of what is changed that would not be alike wherever the code runs, or None.

        Args:
            run: runs the code.
            again: runs it for other numbers of the same shapes.
        """
        run()
        changes = self.found()
        flags = [c.name for c in changes if isinstance(c.was, PLAIN) and isinstance(c.now, PLAIN)]
        has_cached = any(isinstance(change.now, Tensor) for change in changes)
        self._before = Snapshot({"model": self._root})
        again()
        others = [change.name for change in self.found() if not _is_alike(change.was, change.now, 0)]
        name = next(iter([*others, *flags[: 0 if has_cached else 1]]), None)
        return None if name is None else self._named(name)

    def put_back(self) -> None:
        """Let all be as it was."""
        self._before.put_back()

    def _counts(self, change: Change) -> bool:
        holder, key = change.place
        is_ours = key == "training" or str(key).startswith("_tensor_constant")  # what a walk and a trace set
        return not is_ours and change.place not in self._others and holder not in self._theirs

    def _named(self, name: str) -> str:
        return f"{name}{line_in(name, self._root.modules())}"


@dataclass
class BetweenLayers:
    """The code of a model between its layers, watched while it is tried.

    Attributes:
        drawn: whether it makes Python values of draws.
        host: what it changes.
        trains: whether it takes itself to be in training: it does not where it is between layers of other blocks.
        written: a weight that it changes, if there is one.
        asked: what it asks elsewhere.
    """

    drawn: DrawnValues
    host: HostChanges
    trains: bool = True
    written: str = ""
    asked: list[str] = field(default_factory=list)

    @contextmanager
    def within(self, module: nn.Module, *, counts: bool = True) -> Iterator[None]:
        """A context in which a module runs that is called whole."""
        is_whole = not counts or any(True for _ in module.parameters())
        with unheard() if is_whole else nullcontext(), self.drawn.within(counts=counts), self.host.within(module):
            yield

    def require_steady(self, name: str, run: Callable[[], None], again: Callable[[], None]) -> None:
        """Raise `MisfitError` where two runs show that the code does something else each time, or writes elsewhere."""
        changed = self.host.unsteady(run, again)
        require_plain(name, self.asked)
        if self.written:
            raise MisfitError(
                f"the forward of {name} changes the weight {self.written!r} between its layers, where another block "
                "has it: change it in the forward of the module that has it, or in the training loop"
            )
        if changed is not None:
            raise MisfitError(
                f"the forward of {name} changes {changed} between its layers, where each block would have its own: "
                "hold it in a buffer of one layer, or change it in the training loop"
            )
        if self.drawn.reached:
            raise MisfitError(
                f"the forward of {name} makes Python values of random draws between its layers ({self.drawn.reached}),"
                " which other ranks would draw otherwise; keep draws in tensors, or within a layer"
            )


def _is_alike(one: Any, other: Any, depth: int) -> bool:
    """Whether two values are the same for whoever looks at them; numbers that are unknown are not."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_form = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return same_form and (one.is_meta or torch.equal(one, other))
    if isinstance(one, list | tuple) and type(one) is type(other) and depth < _DEEPEST:
        return len(one) == len(other) and all(_is_alike(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and depth < _DEEPEST:
        return one.keys() == other.keys() and all(_is_alike(one[key], other[key], depth + 1) for key in one)
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and bool(one == other))
