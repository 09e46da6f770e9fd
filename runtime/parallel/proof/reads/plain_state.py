"""Numbers, flags and words that the code of a block may read: a function of them may do something else the next time.

    self.steps = 7        self.config.hot = False        Block.calls = 3        TEMPERATURE = 0.5 (a global)

Of modules and of plain objects in their attributes, of classes, and of what their methods and the functions that these
call have as globals. Tensors are none of it: what is done with these is followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, bytes, type(None))
_KNOWN = ("torch.", "quintsched.", "builtins")
_DEEPEST = 3
_GONE = object()

State = dict[tuple[int, Any], tuple[Mapping[Any, Any], object, str]]
"""Where a value is, by the container's id and the key: the container, the value, and its name; of "", its size."""


def plain_state(block: nn.Module) -> State:
    """Return what the code of a block may read, as it is now."""
    found: State = {}
    seen: set[int] = set()
    for name, module in block.named_modules():
        if not _is_known(type(module)):
            _collect(module.__dict__, name or type(module).__name__, found, seen, 0)
            for kind in type(module).__mro__:
                if not _is_known(kind):
                    _collect_class(kind, found, seen)
    return found


def first_change(before: State, after: State) -> str | None:
    """Return the name of a value that is new or another one, if there is one."""
    for key, (_, value, name) in after.items():
        if key not in before or _differs(before[key][1], value):
            return name
    return None


def has_changed(held: Mapping[Any, Any], key: Any, before: object) -> bool:
    """Whether a value is another one by now than it was."""
    now = held.get(key, _GONE) if key != "" else len(held)
    return now is not before and _differs(before, _noted(now))


def _differs(before: object, after: object) -> bool:
    return type(before) is not type(after) or (before != after and not (before != before and after != after))


def _noted(value: object) -> object:
    """Return what is noted of a value: of several, those that are plain."""
    if isinstance(value, (list, tuple, set)):
        return [v if isinstance(v, _PLAIN) else type(v) for v in value]
    return value


def _collect(held: Mapping[str, Any], name: str, found: State, seen: set[int], depth: int) -> None:
    if id(held) in seen or depth > _DEEPEST:
        return
    seen.add(id(held))
    found[id(held), ""] = (held, len(held), name)
    for key, value in held.items():
        if key == "training" or (depth == 0 and str(key).startswith(("_forward_", "_backward_", "_state_dict_"))):
            continue
        here = f"{name}.{key}"
        if isinstance(value, _PLAIN):
            found[id(held), key] = (held, value, here)
        elif isinstance(value, (list, tuple, set)):
            found[id(held), key] = (held, _noted(value), here)
        elif isinstance(value, dict) and key not in ("_parameters", "_modules", "_buffers"):
            _collect(value, here, found, seen, depth + 1)
        elif not isinstance(value, (Tensor, nn.Module, type, FunctionType)) and not _is_known(type(value)):
            _collect(getattr(value, "__dict__", {}), here, found, seen, depth + 1)
            for kind in type(value).__mro__:
                if not _is_known(kind):
                    _collect_class(kind, found, seen)


def _collect_class(kind: type, found: State, seen: set[int]) -> None:
    if id(kind) in seen:
        return
    seen.add(id(kind))
    for key, value in vars(kind).items():
        if isinstance(value, FunctionType):
            _collect_globals(value, found, seen)
        elif isinstance(value, _PLAIN) and not key.startswith("__"):
            found[id(kind), key] = (vars(kind), value, f"{kind.__name__}.{key}")


def _collect_globals(function: FunctionType, found: State, seen: set[int]) -> None:
    """Note what a function, and the functions that it calls, read of their modules."""
    if id(function) in seen:
        return
    seen.add(id(function))
    held = function.__globals__
    for name in _names(function.__code__):
        value = held.get(name)
        if isinstance(value, FunctionType) and not str(value.__module__).startswith(_KNOWN):
            _collect_globals(value, found, seen)
        elif name in held and isinstance(value, _PLAIN):
            found[id(held), name] = (held, value, name)
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=False):
        value = getattr(cell, "cell_contents", None) if name != "__class__" else None
        if isinstance(value, _PLAIN) and value is not None:
            found[id(cell), name] = ({name: value}, value, name)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(_KNOWN)
