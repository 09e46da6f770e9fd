"""Names that reachable code reads, and names that it only writes to; see `bytecode_names`."""

from __future__ import annotations

import re
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ..user_objects.library_or_user import codes_in, is_of_library, is_ours
from ..user_objects.object_contents import hooks_on, stands_for
from ..user_objects.snapshot import Snapshot
from .bytecode_names import FILL, NameUses, union_of, uses_in

_LAST_NAME = re.compile(r"(\w+)(?:\[[^\]]*\])*$")
_BY_ANY_NAME = {"setattr", "__setattr__", "__dict__", "vars", "globals"}
_ENTERED = {"forward", "backward", "setup_context", "jvp", "vjp"}
_UNENTERED = {"__init__", "__new__", "__repr__", "__str__", "__init_subclass__"}


class CodeReads:
    """Objects reachable from a block or function, and the names that its code reads and sets when it runs.

    Args:
        thing: a block, or a function such as a loss.
        snapshot: of the thing.
        is_block: whether it is a block; forwards of modules that a function holds do not count.

    Attributes:
        held: ids of mutable objects it reaches → the names that lead there.
        uses: the uses of names and files in its code.
    """

    def __init__(self, thing: Any, snapshot: Snapshot, *, is_block: bool = True) -> None:
        self.held: dict[int, str] = {}
        for name, token in (*snapshot.holders(), *snapshot.cells()):
            self.held.setdefault(token, name)
        self.held |= {memory_of(tensor): name for name, tensor in snapshot.tensors()}
        values = list(snapshot.values())
        functions = [f for f in values if isinstance(f, FunctionType) and not is_of_library(f)]
        called = None if is_block else _function_of(thing)
        kinds = [kind for kind in values if isinstance(kind, type) and not is_of_library(kind)]
        methods = {id(stands_for(member)): name for kind in kinds for name, member in vars(kind).items()}
        entered = [
            f
            for f in functions
            if f is called
            or f.__name__ == "<lambda>"
            or (is_block and ((key := methods.get(id(f))) is None or key in _ENTERED or _is_operator(key)))
        ]
        self.uses = _uses_of(frozenset(f.__code__ for f in functions), frozenset(f.__code__ for f in entered))

    @property
    def stored(self) -> frozenset[str]:
        """Names that its code sets; all names in it, where code computes names."""
        return self.uses.named if self.uses.named & _BY_ANY_NAME else self.uses.stored

    @property
    def names(self) -> frozenset[str]:
        """Names that its code reads."""
        return self.uses.read

    def reads_into(self, token: int) -> bool:
        """Return whether code may read a container's content; not if it only writes under the last name to it."""
        found = _LAST_NAME.search(self.held.get(token, ""))
        return token in self.held and (found is None or found[1] in self.uses.read or found[1] not in self.uses.named)

    def awaits_entries(self, token: int) -> bool:
        """Return whether code reads a container by name and sets no entries anywhere: new entries come from others."""
        found = _LAST_NAME.search(self.held.get(token, ""))
        return found is not None and found[1] in self.uses.read and FILL not in self.uses.stored


def snapshot_of(thing: Any) -> Snapshot:
    """Return the snapshot of a block or function, hooks on its weights included."""
    weights = thing.named_parameters() if isinstance(thing, nn.Module) else ()
    hooks = {f"{name}, hook": hook for name, weight in weights for hook in hooks_on(weight) if not is_ours(hook)}
    return Snapshot({"": thing, **hooks}, numbers=False)


def memory_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which others may share; of wrappers and meta tensors, their own id."""
    has_none = tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter)
    return id(tensor) if has_none else -tensor.untyped_storage().data_ptr() or id(tensor)


def _function_of(thing: Any) -> FunctionType | None:
    """Return the function that a call of an object enters, if it is user code."""
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
def _uses_of(codes: frozenset[CodeType], entered: frozenset[CodeType]) -> NameUses:
    """Return the uses of the entered code, and of all code that it calls by name."""
    found, waiting, entering = NameUses(frozenset(), frozenset(), frozenset()), codes - entered, entered
    while entering:
        found = union_of([found, *(uses_in(one) for code in entering for one in codes_in(code))])
        entering = frozenset(code for code in waiting if code.co_name in found.named)
        waiting -= entering
    return found
