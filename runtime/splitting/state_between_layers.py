"""Detection of host state that depends on how often code has run, or on the numbers of its inputs.

self.mask = causal(length)          the same after every run of these shapes: all ranks that run it agree
self.calls += 1                     changes with each run: refused
self.last = x.detach()              differs for other numbers, or unknown: refused
self.seen = True                    a flag that the first run sets: refused, as later code reads another value
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

from ..user_objects.branches_on_draws import DrawnValues
from ..user_objects.changes_since_split import line_in
from ..user_objects.find_impure_code import profiled_by
from ..user_objects.library_or_user import PLAIN_TYPES
from ..user_objects.outer_state_reads import require_plain
from ..user_objects.snapshot import ChangedPlace, Snapshot

_DEEPEST = 8

OwnerAndKey = tuple[int, Any]


class HostChanges:
    """Changes of host state by a model's code, without those by the modules that it calls.

    Args:
        root: the model, or a copy of it, in which the code runs.
        apart: modules whose attributes do not count, as a library's own code sets them.
    """

    def __init__(self, root: nn.Module, apart: Iterable[nn.Module] = ()) -> None:
        self._root = root
        self._before = Snapshot({"model": root})
        self._others: set[OwnerAndKey] = set()
        self._theirs = {id(held) for m in apart for held in (vars(m), m._parameters, m._buffers, m._modules)}

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Context in which a module runs that may change its own state."""
        before = Snapshot({"": module})
        try:
            yield
        finally:
            self._others |= {change.place for change in before.changes()}

    def found(self) -> list[ChangedPlace]:
        """Return the changes since the start."""
        return [change for change in self._before.changes() if self._counts(change)]

    def first(self) -> str | None:
        """Return the name and line of the first change; None: there is none."""
        return next((self._named(change.name) for change in self.found()), None)

    def unsteady(self, run: Callable[[], object], again: Callable[[], object]) -> str | None:
        """Return the name and line of a change that would not be the same wherever the code runs; None: there is none.

        Args:
            run: runs the code.
            again: runs it for other numbers of the same shapes.
        """
        run()
        changes = self.found()
        flags = [c.name for c in changes if isinstance(c.was, PLAIN_TYPES) and isinstance(c.now, PLAIN_TYPES)]
        has_cached = any(isinstance(change.now, Tensor) for change in changes)
        self._before = Snapshot({"model": self._root})
        again()
        others = [change.name for change in self.found() if not _is_alike(change.was, change.now, 0)]
        name = next(iter([*others, *flags[: 0 if has_cached else 1]]), None)
        return None if name is None else self._named(name)

    def put_back(self) -> None:
        """Restore the state at the start."""
        self._before.put_back()

    def _counts(self, change: ChangedPlace) -> bool:
        holder, key = change.place
        is_ours = key == "training" or str(key).startswith("_tensor_constant")  # set by the walk and the trace
        return not is_ours and change.place not in self._others and holder not in self._theirs

    def _named(self, name: str) -> str:
        return f"{name}{line_in(name, self._root.modules())}"


@dataclass
class BetweenLayers:
    """Findings about a model's code between its layers, while it is tried.

    Attributes:
        drawn: detects Python values of draws.
        host: detects changes of host state.
        trains: whether it is in training mode: not where it is between layers of other blocks.
        written: name of a weight that it changes, or "".
        asked: calls that are not plain.
    """

    drawn: DrawnValues
    host: HostChanges
    trains: bool = True
    written: str = ""
    asked: list[str] = field(default_factory=list)

    @contextmanager
    def within(self, module: nn.Module, *, counts: bool = True) -> Iterator[None]:
        """Context in which a module runs that is called whole."""
        is_whole = not counts or any(True for _ in module.parameters())
        with (
            profiled_by(None) if is_whole else nullcontext(),
            self.drawn.within(counts=counts),
            self.host.within(module),
        ):
            yield

    def require_steady(self, name: str, run: Callable[[], None], again: Callable[[], None]) -> None:
        """Raise `MisfitError` where two runs show that the code acts differently each time, or has side effects."""
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
    """Return whether two values are equal: tensors, containers and plain values by content, meta tensors by shape."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_form = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return same_form and (one.is_meta or torch.equal(one, other))
    if isinstance(one, list | tuple) and type(one) is type(other) and depth < _DEEPEST:
        return len(one) == len(other) and all(_is_alike(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and depth < _DEEPEST:
        return one.keys() == other.keys() and all(_is_alike(one[key], other[key], depth + 1) for key in one)
    return one is other or (isinstance(one, PLAIN_TYPES) and type(one) is type(other) and bool(one == other))
