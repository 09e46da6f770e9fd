"""Detection of user code that is not plain: whose result depends on more than its arguments and comparable values.

    with asking_elsewhere() as found:        found: "os.environ (model.py, line 12)", "time.time (model.py, line 20)"
        block(x)                             empty: its result can change only with objects that `has_known_content`

A profile function records each call, made by user code or by the plain part of the standard library below it, of a
function other than torch's functions of tensors, numpy, plain builtins and installed packages (not inspected).
Printing, logging and warning only tell. Calls by syntax (`array[0]`, `reference()`) raise no profile event: objects of
unknown content are found by type, where code names them.
"""

from __future__ import annotations

import cProfile
import dis
import inspect
import itertools
import random
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, lru_cache, partial, wraps
from itertools import pairwise
from logging import Logger
from pathlib import Path
from threading import Lock
from types import CodeType, FrameType
from typing import Any, TypeGuard

import numpy as np
import torch

from .library_or_user import is_library_module, once_per_class


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN_MODULES = _names("""
    __future__ _bisect _collections _collections_abc _functools _heapq _operator _random _sre _statistics _struct abc
    bisect builtins cmath collections contextlib copy copyreg dataclasses enum fractions functools heapq inspect
    itertools keyword math numbers numpy operator random re reprlib statistics string struct textwrap types typing
""")
"""Modules of the standard library, and numpy, that read no outer state; their calls are recorded too."""

_TELLING = _names("""
    _warnings _weakrefset codecs linecache logging pprint traceback warnings weakref
""")
"""Modules that only print, log or warn, and those that free memory at any time."""

_NOT_PLAIN = _names("breakpoint compile eval exec globals id input open")

_TORCH = _names("""
    _C._autograd _C._fft _C._functions _C._functorch _C._linalg _C._nested _C._nn _C._sparse _C._special _decomp
    _dynamo _functorch _higher_order_ops _jit_internal _library _lowrank _meta_registrations _ops _prims
    _prims_common _refs
    _subclasses _tensor _tensor_str _utils _VF _compile amp autograd autocast_mode compiler cuda.amp
    distributions fft func functional fx jit library linalg masked nested nn overrides profiler return_types
    sparse special storage types utils._contextlib utils._device utils._pytree utils._python_dispatch
    utils.checkpoint utils.hooks utils.weak
""")
"""Modules of torch that map tensors to tensors, and context managers."""

_OF_TORCH = _names("""
    _check _check_is_size _check_index _check_value _check_type _check_tensor_all _get_tracing_state
    _has_torch_function _has_torch_function_unary _has_torch_function_variadic _is_tracing _log_api_usage_once
    _set_grad_enabled compile is_available is_grad_enabled is_storage is_tensor sym_float sym_int sym_ite
    sym_max sym_min sym_not sym_sum typename vmap wait
""")
"""Functions in torch's own namespaces that do so; grad modes are followed elsewhere."""

_KNOWN_KINDS: frozenset[Any] = frozenset((
    *(type, bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice),
    *(tuple, list, dict, set, frozenset, deque, OrderedDict, defaultdict, partial, itertools.count, BaseException),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, types.CodeType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.CellType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ModuleType),
    *(types.GenericAlias, types.UnionType, property, staticmethod, classmethod, super, re.Pattern, re.Match),
    *(type(inspect.ArgInfo.args), types.SimpleNamespace, torch._C._FunctionBase),
    *(random.Random, random.Random.__base__, torch._C.TensorBase, torch.Generator, torch.Size, torch.dtype),
    *(torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, torch.finfo.__base__),
    *(np.ndarray, np.generic, np.dtype, np.ufunc, np.random.RandomState, np.random.Generator),
))  # fmt: skip
_OWN = ("__dict__", "__weakref__")
_SLOTS_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType)


_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
"""Code of Function.apply; None: it is written in C, from torch 2.14 on."""

_CALLS = ("call", "c_call")
_TAKES_OVER = _names("__torch_function__ __torch_dispatch__")


class _Side(Enum):
    """Origin of a frame's code: the user, a library that calls on behalf of its caller, or a library not inspected."""

    USER = "user"
    PASSES = "passes"
    KEPT = "kept"


@contextmanager
def asking_elsewhere(*, clocks: bool = True, straight: bool = False, backwards: bool = True) -> Iterator[list[str]]:
    """Context that yields the calls of user code on this thread that are not plain, with file and line, each once.

    Without `clocks`, reading a clock counts as measuring, and is not recorded. Code that has to be `straight` must not
    catch errors, import user modules, or override torch's functions or backwards (`_odd`). The former profile function
    is restored at the end; of nested contexts, only the inner one records. Without `backwards`, applying an autograd
    Function is recorded too: given no tensor, torch drops its backward.
    """
    heard = _ImpureCalls(() if clocks else ("time.",), straight=straight, backwards=backwards)
    with profiled_by(heard):
        yield heard.found


_INSTALLING = Lock()
"""Lock for installing a profile function: Python raises if two threads do so at once."""


@contextmanager
def profiled_by(profile: Any) -> Iterator[None]:
    """Context with this profile function on this thread, None: without one; the one before is restored at the end."""
    before = sys.getprofile()
    with _INSTALLING:
        sys.setprofile(profile)
    try:
        yield
    finally:
        with _INSTALLING:
            before.enable() if isinstance(before, cProfile.Profile) else sys.setprofile(before)


def unrecorded(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `__torch_dispatch__` of a mode, with no profile events for calls below an operator of torch's own.

    No user code runs there, unless a tensor is of a subclass, or the user's mode was active before: those are recorded.
    """

    @wraps(handle)
    def handled(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        heard = sys.getprofile()
        if not isinstance(heard, _ImpureCalls) or types or heard.has_modes or func.namespace not in ("aten", "prim"):
            return handle(mode, func, types, args, kwargs)
        with profiled_by(None):
            return handle(mode, func, types, args, kwargs)

    return handled


def has_known_content(thing: object) -> bool:
    """Return whether the content of an object can be compared, judged by its type alone.

    True for plain values, containers, functions, tensors, arrays, random generators, modules, and objects of Python
    classes without other C state; not for iterators, weak references, buffers, locks, or compiled functions.
    """
    return isinstance(thing, type) or _is_known(type(thing))


def asked_of(function: Any) -> str:
    """Return the name of a C function that is not plain; "" for a plain one."""
    module, name = function.__module__, function.__qualname__
    if module is None:
        owner = function.__self__
        kind = owner if isinstance(owner, type) else type(owner)
        return "" if _is_known(kind) or kind is types.MappingProxyType else f"{kind.__module__}.{name}"
    return _asked_of_module(module, name)


@cache
def _asked_of_module(module: str, name: str) -> str:
    if module == "builtins":
        return name if name in _NOT_PLAIN else ""
    is_users = not is_library_module(module)
    is_asked = _is_judged(module, name.rpartition(".")[2]) and not name.startswith("_VariableFunctionsClass.")
    return f"{module}.{name}" if is_users or is_asked else ""


def only_tells(thing: object) -> TypeGuard[Logger]:
    """Return whether an object is a logger: only its level can influence code."""
    return isinstance(thing, Logger)


@once_per_class
def _is_known(kind: type) -> bool:
    if any(base.__module__.startswith("torch.") and _is_judged(base.__module__, "") for base in kind.__mro__):
        return not _KNOWN_KINDS.isdisjoint(kind.__mro__[:-1]) or issubclass(kind, torch.nn.Module)
    of_c = (base for base in kind.__mro__ if _is_of_c(base) and base is not object)
    return all(not _KNOWN_KINDS.isdisjoint(base.__mro__[:-1]) for base in of_c)


def _is_of_c(kind: type) -> bool:
    """Return whether a class is written in C: it has C functions of its own."""
    return any(
        isinstance(held, _SLOTS_OF_C) and held.__objclass__ is kind
        for key, held in vars(kind).items()
        if key not in _OWN
    )


def applied_function(frame: FrameType, event: str, called: Any) -> Any:
    """Return the autograd Function that is applied by a call, as a profile function is given it; None: none is."""
    if event == "call":
        return frame.f_locals["cls"] if frame.f_code is _APPLY else None
    holder = getattr(called, "__self__", None) if getattr(called, "__name__", "") == "apply" else None
    return holder if isinstance(holder, type(torch.autograd.Function)) else None


class _ImpureCalls:
    """Profile function that records calls that are not plain."""

    def __init__(self, passed: tuple[str, ...], *, straight: bool, backwards: bool) -> None:
        self.found: list[str] = []
        self._passed, self._straight = ("time.sleep", "_thread.RLock.__exit__", *passed), straight
        self._backwards = backwards
        self.has_modes = torch._C._len_torch_dispatch_stack() > 0

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        caller: FrameType | None = frame
        if not self._backwards and event in _CALLS and (kind := applied_function(frame, event, called)) is not None:
            name, caller = f"{kind.__qualname__}.apply", self._user(frame, beyond=True)
        elif event == "c_call":
            if _side_of(_module_of(frame)) is _Side.KEPT:
                return
            name = asked_of(called)
        elif event == "call" and (caller := frame.f_back) is not None:
            name = "" if _side_of(_module_of(caller)) is _Side.KEPT else _asked_of_python(frame)
            if self._straight and not name and _side_of(_module_of(frame)) is _Side.USER:
                name, caller = _odd(frame), frame
        else:
            return
        if name and not name.startswith(self._passed) and (user := self._user(caller)) is not None:
            text = f"{name} ({Path(user.f_code.co_filename).name}, line {user.f_lineno})"
            self.found += [] if text in self.found else [text]

    def _user(self, frame: FrameType | None, *, beyond: bool = False) -> FrameType | None:
        """Return the user frame on whose behalf a frame runs (`beyond`: also through other libraries); None: none."""
        while frame is not None and (side := _side_of(_module_of(frame))) is not _Side.USER:
            frame = None if side is _Side.KEPT and not beyond else frame.f_back
        return frame


@cache
def _side_of(module: str) -> _Side:
    """Return the origin of a module's code, by its name; a profile function needs it at each call."""
    library = _Side.PASSES if _top(module) in _PLAIN_MODULES else _Side.KEPT
    return library if is_library_module(module) else _Side.USER


def _asked_of_python(frame: FrameType) -> str:
    """Return the name of the Python function that a frame begins, if it is not plain; else ""."""
    return _asked_of_code(_module_of(frame), frame.f_code.co_name, frame.f_code.co_qualname)


@lru_cache(1 << 16)
def _asked_of_code(module: str, name: str, qualname: str) -> str:
    if not _is_judged(module, name) or name == "__del__" or module.startswith("importlib._bootstrap"):
        return ""
    called = f"{module}.{qualname}".replace("os._Environ", "os.environ")
    return called.rpartition(".")[0] if name.startswith("__") else called


def _odd(frame: FrameType) -> str:
    """Return the reason why a user function is not straight, in words; "" if it is."""
    code = frame.f_code
    given = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    takes_over = code.co_name in _TAKES_OVER and isinstance(given, type)  # of a mode: one around the step may call it
    if isinstance(given, torch._C._FunctionBase) or takes_over:
        return f"what {code.co_qualname} does"
    return _odd_code(code)


@lru_cache(4096)
def _odd_code(code: CodeType) -> str:
    steps = list(dis.get_instructions(code))
    for step, following in pairwise(steps):
        if step.opname == "IMPORT_NAME" and not is_library_module(str(step.argval)):
            return f"for the module {step.argval!r}"
        catches_all = step.opname == "PUSH_EXC_INFO" and following.opname == "POP_TOP"
        if catches_all or step.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
            return "whether an error is raised"
    return ""


@cache
def _is_judged(module: str, name: str) -> bool:
    """Return whether a library function is not plain; functions of installed packages are plain."""
    top, _, inner = module.partition(".")
    if top != "torch":
        return top in sys.stdlib_module_names and top not in _PLAIN_MODULES and top not in _TELLING
    parts = inner.split(".")
    return name not in _OF_TORCH and not any(".".join(parts[:count]) in _TORCH for count in range(1, len(parts) + 1))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
