"""Weightless copy of a model (frame): its forward runs anywhere, to find the arguments of its layers.

    model                     frame: the same code and settings          role
    ├─ embed (weights)        ├─ embed     returns a stand-in            beside
    ├─ rotary (no weights)    ├─ rotary    runs                          beside
    ├─ layers                 ├─ layers                                  way
    │  ├─ 0 … n-1             │  ├─ 0 … n-1  ask the walk               layer
    └─ head (weights)         └─ head      returns a stand-in            beside

A `Walk` runs the forward of a frame once, and supplies the results of layers. The result of a module beside them is a
tensor filled with NaN, so that NaN marks all that depends on missing weights, or with finite numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quintsched.errors import MisfitError

from ..blocks.without_side_effects import run_alone
from ..user_objects.changes_since_split import label_of, tensors_in
from ..user_objects.library_or_user import arguments_of, is_of_library

_CURRENT: ContextVar[Walk | None] = ContextVar("walk", default=None)


class ModelFrame:
    """A copy of a model without weights; its buffers are copies.

    Args:
        model: the model; it is left as it is.
        layers: the names of its modules whose calls are cuts.

    Attributes:
        root: the copy.
        followed: the names of the modules whose code runs in it.
        flags: returns training flags of the model's modules, by their names; may lack some.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)
        self.flags: Callable[[], Mapping[str, bool]] = dict
        scripted = next((n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
        if scripted is not None:
            raise MisfitError(f"{label_of(scripted)} is compiled by torch.jit; give the module itself, not scripted")
        metas = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
        try:
            self.root = copy.deepcopy(model, dict[int, object](metas))
        except Exception as error:
            raise MisfitError(f"{type(model).__name__} cannot be copied, and so not be split: {error}") from error
        ways = {name[:length] for name in self.layers for length in ends_of(name)}
        inner = tuple(f"{name}." for name in self.layers)
        for name, module in list(self.root.named_modules()):
            if name in self.layers:
                _become(module, _Layer)
                module.to("meta")
            elif name in ways:
                _become(module, _WayToWeight)
            elif not name.startswith(inner):
                _become(module, _Beside)
                if any(True for _ in module.parameters()):
                    module.to("meta")
        self.followed = [name for name, module in self.root.named_modules() if _is_here(module)]
        for name in self.followed:
            own = vars(self.root.get_submodule(name))
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                raise MisfitError(
                    f"{label_of(name)} has a hook on its backward, which would run for each block; put it on a layer"
                )
        self._index()

    def _index(self) -> None:
        self.names: dict[int, str] = {id(module): name for name, module in self.root.named_modules()}
        self.ways = [module for module in self.root.modules() if isinstance(module, _WayToWeight)]
        for way in self.ways:
            way.eval()

    def copy(self) -> ModelFrame:
        """Return another frame of the same model, which shares nothing with this one."""
        other = object.__new__(ModelFrame)
        other.layers, other.followed, other.root = self.layers, self.followed, copy.deepcopy(self.root)
        other.flags = self.flags
        other._index()
        return other

    def follow_tensors(self, model: nn.Module) -> None:
        """Replace the frame's buffers and attribute tensors by the model's; on another device, copy their numbers."""
        for name in self.followed:
            module, its = self.root.get_submodule(name), tensors_in(model.get_submodule(name))
            own = tensors_in(module)
            for key in own.keys() & its.keys():
                if own[key].device == its[key].device or own[key].is_meta:
                    (module._buffers if key in module._buffers else vars(module))[key] = its[key]
                elif own[key].shape == its[key].shape and not own[key].is_meta:
                    own[key].copy_(its[key])

    def name_of(self, module: nn.Module) -> str:
        """Return the name, in the model, of a module of the frame."""
        return self.names[id(module)]

    def places(self, name: str) -> Iterator[tuple[nn.Module, str]]:
        """Yield the places of a module as (parent, name there): one module may be registered in several."""
        wanted = self.root.get_submodule(name)
        for module in self.root.modules():
            yield from ((module, key) for key, child in module._modules.items() if child is wanted)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the meta weights to a dtype, as the block computes in it."""
        for parameter in self.root.parameters():
            if parameter.is_meta and parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)

    def move(self, device: torch.device) -> None:
        """Move the frame's buffers to a device."""
        for module in self.root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def set_training(self, training: bool, *, as_model: bool = False) -> None:
        """Set the training flag of the code between layers; with `as_model`, only where the model's own flag is set."""
        flags = self.flags() if as_model and training else {}
        for way in self.ways:
            way.training = training and flags.get(self.names[id(way)], True)


def _is_here(module: nn.Module) -> bool:
    """Whether a module's own code runs in a frame."""
    return isinstance(module, _WayToWeight) or (
        isinstance(module, _Beside) and not any(True for _ in module.parameters())
    )


def ends_of(name: str) -> list[int]:
    """Return the positions in `name` at which the names of its parents end."""
    parent = name.rpartition(".")[0]
    return [0, *(place for place, letter in enumerate(parent) if letter == "."), len(parent)]


class Walk:
    """One run of a frame's forward.

    Args:
        frame: the frame.
        device: device of its tensors.

    Attributes:
        calls: number of calls of layers so far.
        inside: whether a module beside the layers runs, in which no call is replaced.
        records: whether stand-ins join the autograd graphs of the tensors that they replace.
    """

    records = False

    def __init__(self, frame: ModelFrame, device: torch.device) -> None:
        self.frame, self.device = frame, device
        self.calls, self.inside = 0, False

    def run_forward(self, arguments: Mapping[str, Any]) -> Any:
        """Run the forward, with arguments by name."""
        self.frame.move(self.device)
        token = _CURRENT.set(self)
        try:
            args, kwargs = by_place_or_name(self.frame.root, arguments)
            return self.frame.root(*args, **kwargs)
        finally:
            _CURRENT.reset(token)

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of call `number` of a layer."""
        raise NotImplementedError

    def beside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a module beside the layers: one without weights runs, that of others is filled."""
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return args[0] if args else next(iter(kwargs.values()))
        self.inside = True
        try:
            if not any(True for _ in module.parameters()):
                return module(*args, **kwargs)
            return self.filled(self.on_meta(module, args, kwargs))
        finally:
            self.inside = False

    def on_meta(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module on the meta device."""
        given, name = tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (args, kwargs)), type(module).__name__
        if self.records:
            return module(*given[0], **given[1])
        return run_alone(lambda call: module(*call[0], **call[1]), given, name)[0]

    def filled(self, tree: Any) -> Any:
        """Return a tree of stand-ins for the tensors of `tree`, on the walk's device."""
        return tree_map_only(Tensor, lambda leaf: in_graph(self.fill(leaf), leaf), tree)

    def fill(self, like: Tensor) -> Tensor:
        """Return a stand-in for a tensor whose numbers are not known: NaN, or 0 for integers."""
        number = torch.nan if like.is_floating_point() or like.is_complex() else 0
        return torch.full(like.shape, number, dtype=like.dtype, device=self.device)

    def weight(self, owner: nn.Module, name: str, parameter: Tensor) -> Tensor:
        """Return a stand-in for a weight that code uses without calling its module."""
        return in_graph(self.fill(parameter), parameter) if self.records else self.fill(parameter)

    def note_read(self, owner: nn.Module, name: str) -> None:
        """Record that code reads a buffer without calling its module."""


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, tensor: Tensor) -> Tensor:
        return stand_in.clone()


def in_graph(stand_in: Tensor, tensor: Tensor) -> Tensor:
    """Return a stand-in that follows a tensor in its autograd graph, for code that inspects it; it has no backward."""
    return _StandIn.apply(stand_in, tensor) if tensor.requires_grad else stand_in  # type: ignore[no-untyped-call]


def by_place_or_name(model: nn.Module, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model: by position, as hooks on inputs expect them, else by name.

    For hooks that take keyword arguments too, only the first is passed by position, as in a step.
    """
    is_theirs = is_of_library(type(model)) and not isinstance(model, nn.Sequential)
    if not model._forward_pre_hooks or is_theirs:
        return (), dict(given)
    names = list(takewhile(given.__contains__, arguments_of(model.forward)))
    names = names[:1] if model._forward_pre_hooks_with_kwargs else names
    return tuple(given[name] for name in names), {name: given[name] for name in given if name not in names}


def needed(model: nn.Module) -> list[str]:
    """Return the names of the required arguments of a model's forward."""
    _, *parameters = arguments_of(type(model).forward).values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


class _WatchedFrame:
    """Base of the classes of a frame's modules: reads of missing weights go to the walk."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)  # type: ignore[misc]
        walk = _CURRENT.get()
        if not isinstance(found, Tensor) or walk is None or walk.inside:
            return found
        if found.is_meta:
            return walk.weight(self, name, found)  # type: ignore[arg-type]
        walk.note_read(self, name)  # type: ignore[arg-type]
        return found


class _Layer(_WatchedFrame):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        walk = _CURRENT.get()
        if walk is None or walk.inside:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        number, walk.calls = walk.calls, walk.calls + 1
        return walk.layer(self, number, args, kwargs)  # type: ignore[arg-type]


class _WayToWeight(_WatchedFrame):
    pass


class _Beside(_WatchedFrame):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        walk = _CURRENT.get()
        if walk is None or walk.inside:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return walk.beside(self, args, kwargs)  # type: ignore[arg-type]


def _become(module: nn.Module, role: type) -> None:
    module.__class__ = _in_role(type(module), role)  # type: ignore[arg-type]


@cache
def _in_role(kind: type, role: type) -> type:
    """Return a subclass of `kind` with a role; a `device` property, often derived from weights, is that of the walk."""
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if isinstance(getattr(kind, "device", None), property):
        body["device"] = property(_device_of)
    return type(kind.__name__, (role, kind), body)


def _device_of(module: nn.Module) -> torch.device:
    walk = _CURRENT.get()
    return torch.device("cpu") if walk is None else walk.device
