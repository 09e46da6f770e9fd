"""The steps of a forward, found by running it on symbols: torch.fx's graph, made without its global patches.

    model ──▶ skeleton: the same code, weights without data, classes that ask the tracer ──▶ forward(symbols) ──▶ graph
                        a call of a module      one step, or what it does inside, if it is opened
                        a weight or a buffer    one step

torch.fx's own `trace` replaces methods of `nn.Module` for as long as it runs, which other threads would meet: ranks may
be threads. Here only the skeleton's modules have other methods.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError


class Untraceable(Exception):
    """A forward that cannot be traced: its code asks for numbers, or for what symbols do not have."""


@dataclass(frozen=True)
class Traced:
    """What a trace found.

    Attributes:
        graph: the steps; modules and weights go by their names in the model.
        constants: tensors that the forward makes without looking at its inputs, by the names that steps have for them.
    """

    graph: fx.Graph
    constants: dict[str, Tensor]


def trace(model: nn.Module, training: bool) -> Traced:
    """Return the steps of a model's forward, with as many modules opened as hold rows of others; the model stays as is.

    Raises `Untraceable`.
    """
    kept, opened = set[str](), set[str]()
    while True:
        tracer = _Tracer(model, training, kept, opened)
        try:
            return tracer.run()
        except _Unpacked as found:
            if found.name in kept or found.name in opened:
                raise Untraceable(str(found)) from found
            opened.add(found.name)
        except Exception as error:
            inner = tracer.inside[-1] if tracer.inside else ""
            if not inner or inner in kept:
                raise Untraceable(f"{type(error).__name__}: {error}") from error
            kept.add(inner)
            opened.discard(inner)


class _Unpacked(TraceError):
    """The result of a module that was called whole is taken apart, so that it has to be opened."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the result of {name} is taken apart")
        self.name = name


class _Tracer(fx.Tracer):
    """Runs a skeleton on symbols.

    Attributes:
        inside: the names of the opened modules that it is in; it stays so if one raises.
    """

    def __init__(self, model: nn.Module, training: bool, kept: set[str], opened: set[str]) -> None:
        super().__init__()
        self.root = _skeleton(model).train(training)
        self.graph = fx.Graph(tracer_cls=type(self))
        self.tensor_attrs = {}
        self.names = {id(module): name for name, module in self.root.named_modules()}
        self.kept, self.opened, self.inside = kept, opened, list[str]()
        for module in list(self.root.modules()):
            module.__dict__["_tracer"] = self
            kind: type = type(module)
            module.__class__ = _watched(kind)

    def run(self) -> Traced:
        """Return the steps of the root's forward."""
        needed = _needed(type(self.root).forward)
        symbols = {name: self.create_proxy("placeholder", name, (), {}) for name in needed}
        result = self.root.forward(**symbols)
        self.create_node("output", "output", (self.create_arg(result),), {})
        self.graph.eliminate_dead_code(_stays)
        constants = {n: t for n, t in vars(self.root).items() if n.startswith("_tensor_constant")}
        return Traced(self.graph, constants)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Make a step; differentiating is none, since it takes the graph of those before it, which may be elsewhere."""
        if target in (torch.autograd.grad, torch.autograd.backward, "backward"):
            raise TraceError("the forward differentiates")
        return super().create_node(kind, target, *args, **kwargs)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one step of a call, or those inside."""
        name = self.names[id(module)]
        if not self._opens(module, name):
            return self.create_proxy("call_module", name, args, kwargs)
        self.inside.append(name)
        result = module.forward(*args, **kwargs)
        self.inside.pop()
        return result

    def _opens(self, module: nn.Module, name: str) -> bool:
        return name not in self.kept and (name in self.opened or _holds_row(module))

    def attribute(self, module: nn.Module, name: str) -> fx.Proxy:
        """Make a step of a weight or a buffer."""
        return self.create_proxy("get_attr", f"{self.names[id(module)]}.{name}".lstrip("."), (), {})

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unpack a result; one that comes from a module called whole is found by opening it."""
        try:
            return super().iter(obj)
        except TraceError:
            node: Any = obj.node
            while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
                node = node.args[0]
            if isinstance(node, fx.Node) and node.op == "call_module":
                raise _Unpacked(str(node.target)) from None
            raise


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy whose weights and buffers have no data."""
    twins: dict[int, Any] = {id(b): b.to("meta") for b in model.buffers()}
    for parameter in model.parameters():
        twins[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    try:
        return copy.deepcopy(model, twins)
    except Exception as error:
        raise Untraceable(f"it cannot be copied: {error}") from error


@cache
def _watched(kind: type) -> type:
    """Return the class of a skeleton's modules of a kind: calls and weights are the tracer's."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.call(self, args, kwargs)

    def getattr_(self: Any, name: str) -> Any:
        found = kind.__getattr__(self, name)  # type: ignore[attr-defined]
        return self._tracer.attribute(self, name) if isinstance(found, Tensor) else found

    return type(kind.__name__, (kind,), {"__call__": call, "__getattr__": getattr_, "__module__": kind.__module__})


def _needed(forward: Any) -> list[str]:
    """Return the names of what a forward has to be given."""
    _, *parameters = inspect.signature(forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


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
    """Whether a step counts even if nothing takes its result: it is a module's, or changes something."""
    if node.op in ("placeholder", "output", "call_module"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") or "assert" in name or "setitem" in name
