"""Symbolic trace of a forward: torch.fx's graph, made without its global patches.

    model ──▶ skeleton: the same code, weights without data, classes that ask the tracer ──▶ forward(symbols) ──▶ graph
                        a call of a module      one node, or those inside, if it is traced into
                        a weight, a buffer, a tensor in an attribute    one node
                        x += y, x[:, 0] = y     one node, which changes x in place

A trace must be deterministic: code that draws random numbers, or that sets attributes, is not traced. Each node records
the modes that it ran under (no_grad, autocast, …), where these are not those around the model.

torch.fx's own `trace` replaces methods of `nn.Module` while it runs, which would affect other threads: ranks may
be threads. Here only the skeleton's modules have other methods.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from ..blocks.block_builders import meta_twins
from ..comm.random_generators import AllGenerators
from ..comm.torch_modes import Modes, modes_kept
from ..user_objects.changes_since_split import label_of, line_of, tensors_in
from ..user_objects.find_impure_code import asking_elsewhere
from ..user_objects.object_contents import is_hooked
from ..user_objects.outer_state_reads import FINAL_ERRORS, require_plain
from .state_between_layers import HostChanges
from .weightless_model import by_place_or_name, needed


class Untraceable(Exception):
    """A forward that cannot be traced: its code reads values, or uses what symbols do not have."""


@dataclass(frozen=True)
class Traced:
    """Result of a trace.

    Attributes:
        graph: the nodes; modules and weights go by their names in the model.
        constants: tensors that the forward makes independently of its inputs, by their names in the graph.
        entered: the names of the modules that were traced into.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]
    entered: frozenset[str]


_TRIES = 3
"""Attempts at a trace during which generators have moved: another thread may have drawn."""


def trace(model: nn.Module, training: Mapping[str, bool]) -> Traced:
    """Return the graph of a model's forward, tracing into modules that hold rows of others; the model is unchanged.

    `training` has training flags of modules, by their names.

    Raises `Untraceable`, and one of `FINAL_ERRORS` where the model's own forward has calls that are not plain, or
    leaves modes switched; modules that do become leaf modules.
    """
    kept, opened, tries = set[str](), set[str](), 0
    while True:
        tracer = _Tracer(model, training, kept, opened)
        try:
            return _steady(tracer)
        except _Drawn as error:
            tries += 1
            if tries == _TRIES:
                raise Untraceable(str(error)) from error
        except _Unpacked as found:
            if found.name in kept or found.name in opened:
                raise Untraceable(str(found)) from found
            opened.add(found.name)
        except Exception as error:
            inner = tracer.inside[-1] if tracer.inside else ""
            if not inner and isinstance(error, FINAL_ERRORS):
                raise
            if not inner or inner in kept:
                kind = "" if isinstance(error, Untraceable) else f"{type(error).__name__}: "
                raise Untraceable(f"{kind}{error}") from error
            kept.add(inner)
            opened.discard(inner)


def _steady(tracer: _Tracer) -> Traced:
    """Return a tracer's result if it is deterministic: no random numbers drawn, no host state changed."""
    host, generators = HostChanges(tracer.root), AllGenerators()
    try:
        with asking_elsewhere(backwards=False) as tracer.asked:
            traced, changed = tracer.trace_forward(), host.first()
    finally:
        host.put_back()
    require_plain(type(tracer.root).__name__, tracer.asked)
    if generators.have_moved():
        raise _Drawn(
            "the forward draws random numbers that are no function of its inputs (torch.rand(…), random.random()), so "
            "that one draw would stand for all; draw in a module of its own, or as torch.rand_like(x)"
        )
    if changed is not None:
        raise Untraceable(
            f"the forward changes {changed}, which no other rank would see; hold it in a buffer that is changed in "
            "place, change it in a layer, or in the training loop"
        )
    return traced


class _Drawn(Exception):
    """Random numbers are drawn while a forward is traced."""


class _Unpacked(TraceError):
    """The result of a leaf module is unpacked, so that the module has to be traced into."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the result of {name} is taken apart")
        self.name = name


class _Symbol(fx.Proxy):
    """Proxy that supports in-place operators (`+=`) and assignments to its parts (`x[:, 0] = y`), as tensors do."""

    def register_hook(self, hook: Any) -> Any:
        """Refuse a hook, which belongs to the tensor of one run."""
        raise TraceError("the forward registers a hook on a tensor between its layers: register it within a layer")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "grad", "requires_grad"):
            raise TraceError(f"the forward sets .{name} of a tensor")
        super().__setattr__(name, value)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def change(self: fx.Proxy, *others: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *others), {})

    return change


IN_PLACE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.setitem),
)
"""Operators that change their first argument in place, where that is a tensor."""

for _function in IN_PLACE_FUNCTIONS:
    setattr(_Symbol, f"__{_function.__name__}__", _in_place(_function))


class _Tracer(fx.Tracer):
    """Runs a skeleton on symbols.

    Attributes:
        inside: the names of the traced modules around the present node; it stays so if one raises.
        asked: calls that are not plain torch or Python (clocks, files), made by the code while it runs.
    """

    def __init__(self, model: nn.Module, training: Mapping[str, bool], kept: set[str], opened: set[str]) -> None:
        super().__init__()
        self.root = skeleton(model)
        for name, flag in training.items():
            self.root.get_submodule(name).training = flag
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}
        self.names = {id(module): name for name, module in self.root.named_modules()}
        self.kept, self.opened, self.inside = kept, opened, list[str]()
        self.entered, self._around, self._stows = {""}, Modes.now(), False
        self.asked: list[str] = []
        for module in list(self.root.modules()):
            plain = {name for name in tensors_in(module) if name in vars(module)}
            module.__dict__.update(_tracer=self, _tensors=plain)
            for name in plain:
                del module.__dict__[name]  # so that reads reach `__getattr__`
            kind: type = type(module)
            module.__class__ = _watched(kind, frozenset(name for name in plain if hasattr(kind, name)))

    def trace_forward(self) -> Traced:
        """Return the trace of the root's forward."""
        symbols = {name: self.create_proxy("placeholder", name, (), {}) for name in needed(self.root)}
        with modes_kept() as around:
            result = self._opened(self.root, *by_place_or_name(self.root, symbols))
            if self.root.training:
                around.require_kept(f"the forward of {type(self.root).__name__}")
        self.create_node("output", "output", (self.create_arg(result),), {})
        self.graph.eliminate_dead_code(_stays)
        constants = {n: t for n, t in vars(self.root).items() if n.startswith("_tensor_constant")}
        return Traced(self.graph, constants, frozenset(self.entered))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node's result."""
        return _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        """Return an argument of a node; constants become attributes of the root."""
        if isinstance(a, torch.Generator):
            raise TraceError("the forward draws from a generator of its own; draw in a module of its own")
        before, self._stows = self._stows, True
        try:
            return super().create_arg(a)
        finally:
            self._stows = before

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node, with the modes that it runs under if these are not those around the model.

        Differentiation is refused: it needs the autograd graph of earlier nodes, which may be on another rank.
        """
        if target in (torch.autograd.grad, torch.autograd.backward, "backward"):
            raise TraceError("the forward differentiates")
        node = super().create_node(kind, target, *args, **kwargs)
        if (modes := Modes.now()) != self._around:
            node.meta["modes"] = modes
        return node

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create one node for a call, or trace into the module."""
        name = self.names[id(module)]
        if not self._opens(module, name):
            return self.create_proxy("call_module", name, args, kwargs)
        self.inside.append(name)
        self.entered.add(name)
        before = len(self.asked)
        result = self._opened(module, args, kwargs)
        require_plain(name, self.asked[before:])
        self.inside.pop()
        return result

    def _opened(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's forward, with its hooks if it has some."""
        return nn.Module.__call__(module, *args, **kwargs) if is_hooked(module) else module.forward(*args, **kwargs)

    def _opens(self, module: nn.Module, name: str) -> bool:
        return name not in self.kept and (name in self.opened or _holds_row(module))

    def attribute(self, module: nn.Module, name: str) -> fx.Proxy:
        """Create a node for a weight, a buffer or another tensor that a module has."""
        return self.create_proxy("get_attr", f"{self.names[id(module)]}.{name}".lstrip("."), (), {})

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Refuse to set an attribute, except to the tensor already in it, after an in-place operation."""
        if self._stows:
            return object.__setattr__(module, name, value)
        own = self.names[id(module)]
        if isinstance(value, fx.Proxy) and value.node.target in IN_PLACE_FUNCTIONS:
            source: Any = value.node.args[0]
            if source.op == "get_attr" and source.target == f"{own}.{name}".lstrip("."):
                return None
        instead = f"change it in place, self.{name}.copy_(…)"
        if name not in module._buffers:
            instead = "hold it in a buffer that is changed in place, set it in a layer, or in the training loop"
        raise Untraceable(
            f"the forward sets {label_of(own)}.{name}{line_of(type(self.root), name)}, which no other rank would see; "
            f"{instead}"
        )

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unpack a result; for that of a leaf module, request that it be traced into."""
        try:
            return super().iter(obj)
        except TraceError:
            node: Any = obj.node
            while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
                node = node.args[0]
            if isinstance(node, fx.Node) and node.op == "call_module":
                raise _Unpacked(str(node.target)) from None
            raise


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy whose weights and buffers have no data."""
    try:
        return copy.deepcopy(model, meta_twins(model))
    except Exception as error:
        raise Untraceable(f"it cannot be copied: {error}") from error


@cache
def _watched(kind: type, shadowed: Set[str] = frozenset()) -> type:
    """Return a subclass for a skeleton's modules, with calls and weights routed to the tracer.

    `shadowed` names tensors whose names are also class attributes, which Python would find first.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.call(self, args, kwargs)

    def getattr_(self: Any, name: str) -> Any:
        if name in vars(self).get("_tensors", ()):
            return self._tracer.attribute(self, name)
        found = kind.__getattr__(self, name)  # type: ignore[attr-defined]
        return self._tracer.attribute(self, name) if isinstance(found, Tensor) else found

    def setattr_(self: Any, name: str, value: Any) -> None:
        self._tracer.set_attribute(self, name, value)

    body: dict[str, Any] = {name: property(partial(getattr_, name=name)) for name in shadowed}
    body |= {"__call__": call, "__getattr__": getattr_, "__setattr__": setattr_, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def _holds_row(module: nn.Module) -> bool:
    """Whether a module is a row of others, or has one of at least two of a kind."""
    if type(module).forward is nn.Sequential.forward:
        return True
    if isinstance(module, nn.ModuleDict):
        return False
    rows = [child for child in module.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
    return any(_is_row(row) for row in rows) or _is_row(module)


def _is_row(module: nn.Module) -> bool:
    children = list(module.children())
    kinds = {type(child) for child in children}
    return len(children) > 1 and len(kinds) == 1 and any(True for _ in children[0].children())


def _stays(node: fx.Node) -> bool:
    """Whether a node must be kept without users: it is a module's, or has a side effect."""
    if node.op in ("placeholder", "output", "call_module"):
        return True
    if node.target in IN_PLACE_FUNCTIONS or "out" in node.kwargs:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or "assert" in name or "setitem" in name
