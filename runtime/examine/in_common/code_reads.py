"""Names that code reads, and names that it only writes to, among all that something reaches.

norms[name] = g.norm()      log.append(x)      calls["a"] += 1      self.calls += 1        written
norms[name] / 2             log[-1]            len(calls)           self.calls > 3         read
"""

from __future__ import annotations

import dis
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...objects.snapshot import Snapshot
from ...objects.spaces import hooks_on, stands_for
from ...objects.user_code import codes_in, is_of_library, is_ours

_LAST_NAME = re.compile(r"(\w+)(?:\[[^\]]*\])*$")
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_SETS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_")
_ADDERS = {"append", "appendleft", "add", "extend", "insert", "update"}
_BY_ANY_NAME = {"setattr", "__setattr__", "__dict__", "vars", "globals"}
_ENTERED = {"forward", "backward", "setup_context", "jvp", "vjp"}
_UNENTERED = {"__init__", "__new__", "__repr__", "__str__", "__init_subclass__"}


class _Uses(NamedTuple):
    """The names that code reads, those that it sets, and all of them."""

    read: frozenset[str]
    stored: frozenset[str]
    named: frozenset[str]


class CodeReads:
    """What something reaches, and which names its code reads and sets when it runs.

    Args:
        thing: a block, or a function such as a loss.
        snapshot: of the thing, if there is one.
        is_block: whether it is a block; of modules that a function holds the forwards do not count.
    """

    def __init__(self, thing: Any, snapshot: Snapshot | None = None, *, is_block: bool = True) -> None:
        snapshot = snapshot or snapshot_of(thing)
        self.held: dict[int, str] = {}
        for name, token in (*snapshot.holders(), *snapshot.cells()):
            self.held.setdefault(token, name)
        self.held |= {memory_of(tensor): name for name, tensor in snapshot.tensors()}
        values = list(snapshot.values())
        functions = [f for f in values if isinstance(f, FunctionType) and not is_of_library(f)]
        called = None if is_block else _function_of(thing)
        kinds = [kind for kind in values if isinstance(kind, type) and not is_of_library(kind)]
        methods = {id(stands_for(member)) for kind in kinds for member in vars(kind).values()}
        entered = [
            f
            for f in functions
            if f is called
            or f.__name__ == "<lambda>"
            or (is_block and (id(f) not in methods or f.__name__ in _ENTERED or _is_operator(f.__name__)))
        ]
        self._uses = _uses_of(frozenset(f.__code__ for f in functions), frozenset(f.__code__ for f in entered))

    @property
    def stored(self) -> frozenset[str]:
        """The names that its code sets; those of all that it names, where it makes up names."""
        return self._uses.named if self._uses.named & _BY_ANY_NAME else self._uses.stored

    @property
    def names(self) -> frozenset[str]:
        """The names that its code reads."""
        return self._uses.read

    def reads_into(self, token: int) -> bool:
        """Whether code may read what is in a container: unless it only writes under the last name that leads there."""
        found = _LAST_NAME.search(self.held.get(token, ""))
        return token in self.held and (found is None or found[1] in self._uses.read or found[1] not in self._uses.named)


def snapshot_of(thing: Any) -> Snapshot:
    """Return what a block or a function reaches, by hooks on its weights, too."""
    weights = thing.named_parameters() if isinstance(thing, nn.Module) else ()
    hooks = {f"{name}, hook": hook for name, weight in weights for hook in hooks_on(weight) if not is_ours(hook)}
    return Snapshot({"": thing, **hooks}, numbers=False)


def memory_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor, which others may have as well."""
    return id(tensor) if tensor.is_meta else -tensor.untyped_storage().data_ptr() or id(tensor)


def _function_of(thing: Any) -> FunctionType | None:
    """Return the code that a call of something begins with, if it is a user's."""
    while isinstance(thing, partial):
        thing = thing.func
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if not isinstance(thing, FunctionType):
        thing = getattr(type(thing), "forward" if isinstance(thing, nn.Module) else "__call__", None)
    return thing if isinstance(thing, FunctionType) and not is_of_library(thing) else None


def _is_operator(name: str) -> bool:
    return name.startswith("__") and name not in _UNENTERED


@lru_cache(maxsize=1024)
def _uses_of(codes: frozenset[CodeType], entered: frozenset[CodeType]) -> _Uses:
    """Return what some codes use, and those among all that they call by name."""
    found, waiting, entering = _Uses(frozenset(), frozenset(), frozenset()), codes - entered, entered
    while entering:
        uses = [found, *map(_uses_in, entering)]
        found = _Uses(*(frozenset().union(*names) for names in zip(*uses, strict=True)))
        entering = frozenset(code for code in waiting if code.co_name in found.named)
        waiting -= entering
    return found


@lru_cache(maxsize=4096)
def _uses_in(function: CodeType) -> _Uses:
    read, stored, named = set[str](), set[str](), set[str]()
    for code in codes_in(function):
        steps = [*dis.get_instructions(code)]
        for place, step in enumerate(steps):
            is_text = isinstance(step.argval, str) and step.opname == "LOAD_CONST"
            if step.opname in _LOADS or is_text:
                named.add(step.argval)
                if not _is_written(steps, place, is_text=is_text):
                    read.add(step.argval)
            elif step.opname.startswith(_SETS):
                stored.add(step.argval)
    return _Uses(frozenset(read), frozenset(stored), frozenset(named))


def _is_written(steps: Sequence[dis.Instruction], place: int, *, is_text: bool) -> bool:
    """Whether what is looked up at a place is only written to, or changed by what it was."""
    name, after = steps[place].argval, steps[place + 1 :]
    if is_text:
        return after[0].opname.startswith(("STORE_", "DELETE_"))
    if place and steps[place - 1].opname == "COPY" and steps[place].opname == "LOAD_ATTR":  # self.calls += 1
        return True
    while after[0].opname == "LOAD_ATTR":
        after = after[1:]
    if _is_adding(after[0]):
        return True
    if after[0].opname == "LOAD_METHOD" and after[0].argval != "setdefault":
        return False
    above = 0  # how much is on the stack behind what was looked up
    for step, following in pairwise(after):
        if above == 1 and step.opname in ("STORE_SUBSCR", "BINARY_SUBSCR", "COPY"):
            return step.opname != "BINARY_SUBSCR" or _is_adding(following)
        if above == 1 and step.opname == "BINARY_OP":  # calls += 1
            return following.opname.startswith("STORE_") and following.argval == name and step.argrepr.endswith("=")
        above += dis.stack_effect(step.opcode, step.arg, jump=False)
        if above <= 0 or "JUMP" in step.opname:
            return step.opname == "CALL" and _is_adding(following)  # of what `setdefault` gives
    return False


def _is_adding(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_METHOD" and step.argval in _ADDERS
