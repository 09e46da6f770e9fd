"""Where in a model's code a draw is called: the module whose method runs, and users' lines down to the draw.

    Noise.forward(s, x) ◀── helper(x) ◀── torch.randn(…)        module: that Noise     path: "helper 12", "forward 94"
    Module._call_impl, inner, checkpoint, decorate_context      frames of torch are none of the path

So a place is the same with hooks and without, in a first step and in a later one, in a resumed run, and with other
versions of torch. The module is the first argument of a method of its class, whatever that is called, or the one that
torch is calling (`_call_impl`), where `forward` is a function that was put in its place.

Within a backward, a function that is no method may run again without its module being called (torch.utils.checkpoint).
Its place is then that which it had in the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Hashable, Mapping
from inspect import getattr_static, unwrap
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from quintsched.errors import MisfitError

_TORCH = f"{Path(torch.__file__).parent}/"
_OURS = f"{Path(__file__).parents[2]}/"

Lines = tuple[str, ...]
"""What leads from a module to a call: functions and places in them, the innermost first."""

Place = tuple[int, Lines]


class CallPlaces:
    """Finds places of calls.

    Args:
        known: the ids of the model's modules.

    Attributes:
        forks: whether a user's function that led to the last call calls `torch.random.fork_rng`, or a helper that does.
    """

    def __init__(self, known: Container[int]) -> None:
        self._known, self.forks = known, False
        self._forking: dict[CodeType, bool] = {}
        self._of_functions: WeakKeyDictionary[object, dict[Lines, Place]] = WeakKeyDictionary()
        self._of_lines: dict[Lines, set[Place]] = {}

    def locate(self, below: CodeType) -> tuple[int | None, Lines]:
        """Return the id of the module that calls what runs in the frame of `below`, and the lines from there.

        None: it is of no module. Raises `MisfitError` where a backward runs a function again, and nobody knows for
        which of several modules.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not below:
            frame = frame.f_back
        is_again, self.forks = torch._C._current_graph_task_id() != -1, False
        lines: list[str] = []
        passed: list[tuple[object, Lines]] = []
        inner: CodeType | None = None
        while frame is not None and (frame := frame.f_back) is not None:
            code = frame.f_code
            owner = self._owner(frame, code)
            if code.co_filename.startswith(_TORCH):
                if inner is not None:
                    passed += [(function, tuple(lines)) for function in _given(frame, inner)]
                inner = None
            elif code.co_filename.startswith(_OURS):
                if owner is None and is_again:
                    break
            else:
                lines.append(f"{code.co_name} {frame.f_lasti}")
                self.forks |= self._may_fork(frame, code)
                inner = code
            if owner is not None:
                place = owner, tuple(lines)
                if not is_again:
                    self._note(place, passed)
                return place
        return self._noted(passed, tuple(lines)) if is_again else (None, tuple(lines))

    def _may_fork(self, frame: FrameType, code: CodeType) -> bool:
        if code not in self._forking:
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self._forking[code] = _forks(code, frame.f_globals, type(first))
        return self._forking[code]

    def _owner(self, frame: FrameType, code: CodeType) -> int | None:
        """Return the id of the module of which a frame runs a method; None: of none."""
        if not code.co_argcount:
            return None
        first = frame.f_locals.get(code.co_varnames[0])
        if id(first) not in self._known or not isinstance(first, nn.Module):
            return None
        if code.co_varnames[0] == "self":
            return id(first)
        home = code.co_qualname.rpartition(".")[0]
        return id(first) if any(kind.__qualname__ == home for kind in type(first).__mro__) else None

    def _note(self, place: Place, passed: list[tuple[object, Lines]]) -> None:
        for function, lines in passed:
            self._of_functions.setdefault(function, {})[lines] = place
        for end in range(1, len(place[1])):
            self._of_lines.setdefault(place[1][:end], set()).add(place)

    def _noted(self, passed: list[tuple[object, Lines]], lines: Lines) -> tuple[int | None, Lines]:
        """Return the place in the forward of what runs again without its module."""
        for function, through in passed:
            found = self._of_functions.get(function, {}).get(through)
            if found is not None:
                return found
        places = self._of_lines.get(lines, set())
        if len(places) > 1:
            raise MisfitError(
                f"a function that draws is run again within a backward ({lines[-1].partition(' ')[0]}), and several "
                "places of the model call it, so that nobody knows for which that is; make it a method of its module, "
                "or let the plan recompute (recompute=1)"
            )
        return next(iter(places), (None, lines))


def _given(frame: FrameType, code: CodeType) -> list[object]:
    """Return the functions of this code, or the objects whose methods they are, that a frame of torch holds."""
    functions = (FunctionType, MethodType)
    held = [value for value in frame.f_locals.values() if isinstance(value, functions) and value.__code__ is code]
    owners = [value.__self__ if isinstance(value, MethodType) else value for value in held]
    return [owner for owner in owners if isinstance(owner, Hashable) and type(owner).__weakrefoffset__]


def _forks(code: CodeType, space: Mapping[str, Any], owner: type, depth: int = 2) -> bool:
    """Whether code calls `fork_rng`, or functions of its module or methods of its class that do."""
    if "fork_rng" in code.co_names or not depth:
        return "fork_rng" in code.co_names
    found = (space[name] if name in space else getattr_static(owner, name, None) for name in code.co_names)
    others = (unwrap(other) for other in found if isinstance(other, FunctionType))
    return any(_forks(other.__code__, other.__globals__, owner, depth - 1) for other in others)
