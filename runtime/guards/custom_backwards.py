"""Suspects: blocks that may have custom backwards, by the code that is reachable from them, and by one run of each.

    reached    a class of autograd Functions; code that names a hook on gradients; such hooks       ┐ suspects, which
    run        Function.apply, register_hook, … called, in whatever code; nodes of C++              ┘ are then tried

    neither    a block is run where its code leads to other packages than those below, or looks names up by strings

State that steers user code in blocks, and the hooks of all, are checked once in a step. A rank that finds a change
piggybacks that on the figures of the step, and all ranks examine their blocks again before weights are updated.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from ..user_objects.control_flow_state import SteeringState
from ..user_objects.find_impure_code import applied_function, has_known_content, only_tells, profiled_by
from ..user_objects.library_or_user import is_library_module, is_of_library, names_of
from ..user_objects.object_contents import HOOKS, HOOKS_OF_ALL, hooks_on, is_of_torch
from ..user_objects.snapshot import Snapshot

_KNOWN = frozenset({"torch", "numpy", "transformers", "timm", "peft", "quintsched", *sys.stdlib_module_names})
_KNOWN_BY_NAME = _KNOWN - {"__main__"}
_OF_OTHERS = ("torch._", "torch.utils._")
"""Modules of torch that build Functions of user functions, and call them."""

_HOOKING = {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    torch.autograd.graph.register_multi_grad_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_backward_hook,
}
_HOOKING_CODE = {function.__code__ for function in _HOOKING}
_NAMES = frozenset({function.__name__ for function in _HOOKING} | {"apply", "register_prehook"})
"""Names in code that applies an autograd Function, or registers a hook while it runs."""
_DETACHING = frozenset({"detach", "detach_", "no_grad", "data"}) | {
    *("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine"),
}
"""Names in code that can give a value another gradient than its own."""

_BY_STRINGS = frozenset({"getattr", "__getattr__", "__getattribute__", "attrgetter", "methodcaller", "ops"}) | {
    *("eval", "exec", "compile", "globals", "__import__", "import_module"),
}
"""Names in code that looks up names by strings."""
_LOOKED_INTO = (
    *(nn.Module, Tensor, tuple, OrderedDict, defaultdict, deque),
    *(MethodType, partial, property, staticmethod, classmethod, SimpleNamespace, UserDict),
)

_OF_GRADIENT, _OF_SUM = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def is_known(thing: Any) -> bool:
    """Return whether a class or function is of a library whose backwards are linear in the gradient."""
    return _is_known_module(str(getattr(thing, "__module__", None) or ""))


@cache
def _is_known_module(name: str) -> bool:
    return name.partition(".")[0] in _KNOWN_BY_NAME and not name.startswith(_OF_OTHERS)


def hooks_of(block: nn.Module) -> list[Any]:
    """Return users' hooks on gradients of modules and weights."""
    found = [*global_hooks._global_backward_hooks.values(), *global_hooks._global_backward_pre_hooks.values()]
    for module in block.modules():
        found += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    return _of_users([*found, *hooks_on(*block.parameters())])


def _of_users(hooks: list[Any]) -> list[Any]:
    known = _is_known_module
    return [hook for hook in hooks if not known(str(getattr(getattr(hook, "func", hook), "__module__", None) or ""))]


class Code:
    """Code that is reachable from a block.

    Attributes:
        is_plain: whether none of it is user code, or of an unknown library.
        is_suspect: whether it can change gradients.
        may_detach: whether it can give values other gradients than their own.
        has_more: whether it leads to code that is not inspected and may do so: other packages, computed names.
        hooks: users' hooks on gradients of modules and weights.
        tensors: the user's tensors that are no weights.
    """

    def __init__(self, block: nn.Module) -> None:
        root = getattr(getattr(getattr(block, "_origin", None), "frame", None), "root", None)
        self.hooks = {f"hook {k}": hook for k, hook in enumerate(hooks_of(block))}
        of_all = {name: getattr(global_hooks, name) for name in HOOKS_OF_ALL}
        roots = {"block": None if is_of_torch(block) else block, "model": root, **self.hooks, **of_all}
        there = {name: thing for name, thing in roots.items() if thing not in (None, {})}  # a module may have no truth
        reached = [*Snapshot(there, numbers=False).values()]
        others = [thing for thing in reached if isinstance(thing, FunctionType | type) and not is_known(thing)]
        of_known = {id(t) for m in reached if isinstance(m, nn.Module) and is_known(type(m)) for t in m.buffers(False)}
        tensors = (thing for thing in reached if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter))
        self.is_plain = not others
        self.is_suspect = bool(self.hooks) or any(map(_is_sign, others))
        own = (f for f in others if isinstance(f, FunctionType) and not is_of_library(f))
        self.may_detach = any(not _DETACHING.isdisjoint(names_of(f.__code__)) for f in own)
        self.tensors = [tensor for tensor in tensors if id(tensor) not in of_known and not tensor.is_inference()]
        self.has_more = any(map(_leads_on, reached))
        self._reached = reached

    def unknown(self) -> Any:
        """Return an object whose content cannot be compared; None: there is none."""
        return next((thing for thing in self._reached if not (has_known_content(thing) or only_tells(thing))), None)


def _is_sign(thing: FunctionType | type) -> bool:
    if isinstance(thing, type):
        return issubclass(thing, torch.autograd.Function)
    of_start = "init" in thing.__name__  # nn.Module.apply is called there
    return not (of_start or is_of_library(thing) or _NAMES.isdisjoint(names_of(thing.__code__)))


def _leads_on(thing: Any) -> bool:
    if isinstance(thing, FunctionType) and not is_of_library(thing):
        names = {thing.__name__, *names_of(thing.__code__)}
        found = (thing.__globals__.get(name, sys.modules.get(name)) for name in names)
        of_others = (module.__name__ for module in found if isinstance(module, ModuleType))
        return not _BY_STRINGS.isdisjoint(names) or any(
            is_library_module(m) and not _is_known_module(m) for m in of_others
        )
    if isinstance(thing, FunctionType | type):
        return is_of_library(thing) and not is_known(thing)
    if isinstance(thing, BuiltinFunctionType):
        return str(thing.__module__ or "builtins").partition(".")[0] not in _KNOWN
    kind = type(thing)
    if isinstance(thing, _LOOKED_INTO) or kind in (dict, list, set) or not is_of_library(kind):
        return False
    return not is_known(kind) or callable(thing) or isinstance(thing, Mapping | Iterator | Set)


class Calls:
    """Profile function that watches the calls of a block.

    Attributes:
        has_own: whether it has applied a Function, or registered a hook, that is not of a known library.
    """

    def __init__(self) -> None:
        self.has_own = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which this thread's calls are watched."""
        with profiled_by(self._note):
            yield

    def look_at(self, made: Sequence[Tensor]) -> None:
        """Look for custom Functions in the autograd graph of outputs: of C++, or applied by C code, as by a partial."""
        nodes, seen = [t.grad_fn for t in made], set[Any]()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                applied = getattr(node, "_forward_cls", None)
                self.has_own |= "CppNode" in node.name() or not (applied is None or is_known(applied))
                nodes += [before for before, _ in node.next_functions]

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        kind = applied_function(frame, event, called) if event in ("call", "c_call") else None
        if kind is not None:
            self.has_own |= not is_known(kind)
        elif event == "call" and frame.f_code in _HOOKING_CODE:
            self._note_caller(frame.f_back)
        elif event == "c_call" and getattr(called, "__name__", "") in _NAMES:  # hooks on nodes of a graph
            self._note_caller(frame)

    def _note_caller(self, frame: FrameType | None) -> None:
        self.has_own |= frame is None or not _is_known_module(str(frame.f_globals.get("__name__", "")))


class HooksAndModules:
    """Hooks on blocks and their weights, and the blocks' submodules: compared without Python calls."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        modules = [module for block in blocks for module in block.modules()]
        self._hooks = [getattr(module, name) for module in modules for name in HOOKS]
        self._hooks += [getattr(global_hooks, name) for name in HOOKS_OF_ALL]
        self._weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        self._inner = [module._modules for module in modules if module._modules]
        self._of_user = self._hooks_of_user()
        self._seen: tuple[int, list[Any]] | None = None
        self.is_same()

    def is_same(self) -> bool:
        """Return whether no user hook and no submodule was added or removed."""
        weights = self._weights
        held = filter(None, chain(self._hooks, map(_OF_GRADIENT, weights), map(_OF_SUM, weights)))
        now = sum(map(sum, held)), list(chain.from_iterable(map(dict.values, self._inner)))
        if now == self._seen:
            return True
        is_same = self._seen is None or (now[1] == self._seen[1] and self._hooks_of_user() == self._of_user)
        self._seen = now if is_same else self._seen
        return is_same

    def _hooks_of_user(self) -> list[Any]:
        return _of_users([*chain.from_iterable(map(dict.values, self._hooks)), *hooks_on(*self._weights)])


class Watched:
    """State that may give a block another backward: its shape, state that steers user code, and suspects' tensors.

    Attributes:
        is_own: whether it has more than its shape.
    """

    def __init__(self, block: nn.Module, code: Code, *, is_suspect: bool) -> None:
        self._shape, modules = HooksAndModules([block]), enumerate(block.modules())
        own = {str(place): module for place, module in modules if not is_known(type(module))}
        self.is_own = bool(own or code.hooks or is_suspect)
        self._state = SteeringState(own, code.hooks, inner=False)
        self._state.let_go()
        self._tensors = [(tensor, tensor._version) for tensor in code.tensors if is_suspect]

    def has_changed(self) -> bool:
        """Return whether any of it has changed."""
        if not self._shape.is_same() or any(tensor._version != version for tensor, version in self._tensors):
            return True
        return any(True for _ in self._state.moved(hooks=False))
