"""Whether what code keeps on the host depends on how often it has run, or on the numbers that it was given.

self.mask = causal(length)          the same after every run of these shapes: whoever runs it has it
self.calls += 1                     another after each run: refused
self.last = x.detach()              another for other numbers, or unknown: refused
self.seen = True                    a flag that the first run sets: refused, for one who asks for it sees another
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..agreement.user_code import PLAIN, is_of_library
from ..blocks.host_state import HostState
from .followed import attributes_set, line_in, tensors_in

_DEEPEST = 8
_GONE = object()


def changing(
    modules: Mapping[str, nn.Module],
    others: Mapping[str, nn.Module],
    run: Callable[[], object],
    again: Callable[[], object],
) -> str | None:
    """Return the name and the line of what code changes that would not be alike wherever it runs; None: nothing is.

    Args:
        modules: whose code it is, by the names that they have in messages; libraries' are left out.
        others: modules that it calls, which may have attributes that it sets.
        run: runs the code.
        again: runs it for other numbers of the same shapes.
    """
    own = {name: module for name, module in modules.items() if not is_of_library(type(module))}
    is_set = {name for module in own.values() for name in attributes_set(type(module))}
    before = _State(own)
    earlier = {name: dict(vars(module)) for name, module in {**own, **others}.items()}
    run()
    changes = [*before.state.changes(), *_made(own, earlier, None), *_made(others, earlier, is_set)]
    flags = [name for name, was, now in changes if isinstance(was, PLAIN) and isinstance(now, PLAIN)]
    has_cached = any(isinstance(now, Tensor) for _, _, now in changes)
    after = _State(own)
    again()
    name = next(after.changes(), None) or next((name for name in flags if not has_cached), None)
    return None if name is None else f"{name}{line_in(name, own.values())}"


def _made(
    modules: Mapping[str, nn.Module], earlier: Mapping[str, Mapping[str, Any]], names: set[str] | None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes that modules did not have, or of some names those that are others, as changes."""
    for name, module in modules.items():
        for key, now in vars(module).items():
            was = earlier[name].get(key, _GONE)
            if was is _GONE if names is None else (key in names and was is not now):
                yield f"{name} ({type(module).__name__}).{key}", None if was is _GONE else was, now


class _State:
    """What modules keep, and the numbers of tensors among it."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.state = HostState(modules, {}, inner=False)
        tensors = {id(tensor): ("a tensor in a container", tensor) for tensor in self.state.tensors()}
        for name, module in modules.items():
            tensors |= {id(t): (f"{name} ({type(module).__name__}).{key}", t) for key, t in tensors_in(module).items()}
        self._numbers = [(name, t, t.detach().clone()) for name, t in tensors.values() if not t.is_meta]

    def changes(self) -> Iterator[str]:
        """Yield the names of what is not as it was; tensors of the same numbers are."""
        yield from (name for name, was, now in self.state.changes() if not _is_alike(was, now, 0))
        yield from (name for name, now, was in self._numbers if not _is_alike(was, now, 0))


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
