"""Twins: copies of a block with random weights, which are run without touching the trained ones.

    block ──▶ blueprint: all but its weights ──▶ twin, drawn from a seed: the same on all ranks

Weights are drawn, not copied: initial weights near zero (the last matmul of a block, a layer scale of 1e-5) would hide
a wrong cut.

Search for references to layers and weights outside of the module tree, which a cut or deep copy would not update.

self.fc1                                    a submodule: copied, and cut in its place
self.tied = [self.fc1.weight]               refers to the whole weight, which is not trained once the layer is cut
self.run = lambda x: self.fc2(self.fc1(x))  a closure, which deep copies of the block share
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import prod
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quintsched.errors import MisfitError

from ...blocks.block_builders import build_block, on_meta
from ...user_objects.host_value_equality import marks_of
from ...user_objects.library_or_user import PLAIN_TYPES, is_of_library
from ...user_objects.object_contents import HOOKS, OF_TORCH, ClosureCells, attributes_of, defaults_of, parts_of
from ..tensor.adjust_modules_around_pairs import restore_sizes

TensorKind = TypeVar("TensorKind", bound=Tensor)

SEED = 20_240_229

FEW = 4
"""Most elements of a tensor that is taken for a control value (a flag, a scale), not for data of some magnitude."""

_OURS = "quintsched.runtime.parallel."
_CUT = (f"{_OURS}tensor.", f"{_OURS}expert.")
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


def at_work(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is proved: float32 for shorter ones, whose rounding would hide differences."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class Blueprint:
    """Copy of a block from before any cut, with meta weights and copied buffers.

    A block that cannot be copied is built again by `builder`, if given; otherwise the error is raised. Raises
    `MisfitError` if the block holds `layers`, which are to be cut, in other places too.
    """

    def __init__(
        self, block: nn.Module, builder: Callable[[], nn.Module] | None = None, layers: Iterable[str] = ()
    ) -> None:
        require_held_once(block, [block.get_submodule(name) for name in layers])
        metas = {
            id(p): marked(nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad), p)
            for p in block.parameters()
        }
        self._builder: Callable[[], nn.Module] | None = None
        self._hooks: dict[str, dict[str, Any]] = {}
        try:
            self.bare = copy.deepcopy(block, dict[int, object](metas))
        except Exception:
            self.bare = block if builder is None else on_meta(builder)
            again = {id(parameter) for parameter in self.bare.parameters()}
            if any(id(parameter) in again for parameter in block.parameters()):  # the builder returns the same module
                raise
            self._builder = builder

    def renewed(self, block: nn.Module) -> Blueprint:
        """Return a blueprint of a block's present state; cut layers in it are whole, as before the cut.

        Raises an error if it cannot be copied, or has other layers or weights than before.
        """
        if self._builder is not None:
            raise MisfitError("it cannot be copied")
        require_held_once(block, [m for m in block.modules() if type(m).__module__.startswith(_CUT)])
        names, modules = dict(self.bare.named_parameters(remove_duplicate=False)), dict(self.bare.named_modules())
        weights, memo, hooks = dict[int, nn.Parameter](), dict[int, Any](), dict[str, dict[str, Any]]()
        for name, parameter in block.named_parameters(remove_duplicate=False):
            if name not in names:
                raise MisfitError(f"it has another weight, {name!r}")
            outline = torch.empty_like(names[name], device="meta")
            weight = marked(nn.Parameter(outline, parameter.requires_grad), parameter)
            memo[id(parameter)] = weights[id(names[name])] = memo.get(id(parameter), weight)
        for name, module in block.named_modules():
            if type(module).__module__.startswith(_CUT):
                memo[id(module)] = copy.deepcopy(modules[name], dict[int, Any](weights))
                hooks[name] = {key: copy.copy(vars(module)[key]) for key in (*_HOOKS, "_is_full_backward_hook")}
            for leaf in tree_leaves(
                {key: held for key, held in vars(module).items() if key not in ("_parameters", "_modules")}
            ):
                if isinstance(leaf, Tensor) and not leaf.is_leaf:
                    memo[id(leaf)] = leaf.detach().clone()
        found = copy.copy(self)
        found.bare, found._hooks = copy.deepcopy(block, memo), hooks
        for module in found.bare.modules():
            restore_sizes(module)
            for held in (vars(module)[key] for key in _HOOKS):
                for key in [key for key, hook in held.items() if _is_ours(hook)]:
                    del held[key]
        return found

    def put_hooks(self, twin: nn.Module) -> None:
        """Register on a twin's layers the hooks that were registered on the block's layers after the cut."""
        for name, hooks in self._hooks.items():
            for key, hook in hooks.items():
                held = vars(twin.get_submodule(name))
                if isinstance(hook, dict):
                    held[key].update(hook)
                else:
                    held[key] = hook

    def _copy(self) -> nn.Module:
        if self._builder is None:
            twin = copy.deepcopy(self.bare)
            for own, its in zip(twin.parameters(), self.bare.parameters(), strict=True):
                marked(own, its)
            return twin
        return build_block(self._builder, 0, SEED)

    @property
    def short_type(self) -> torch.dtype | None:
        """Dtype of its weights that is proved in float32 instead (such as bfloat16); None: there is none."""
        types = (p.dtype for p in self.bare.parameters())
        return next((dtype for dtype in types if at_work(dtype) is not dtype), None)

    def draw(self, device: torch.device, *, as_built: bool = False, trains: bool = False) -> nn.Module:
        """Return a twin with weights drawn from the seed, in evaluation mode, or as the block is in training.

        `as_built`: in the dtypes of a real run, not in those of the comparison.
        """
        twin = self._copy()
        generator = torch.Generator(device).manual_seed(SEED)
        drawn: dict[int, nn.Parameter] = {}
        for module in twin.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in drawn:
                        weight = draw_weight(name, parameter, device, generator)
                        weight = weight.to(parameter.dtype) if as_built else weight
                        drawn[id(parameter)] = marked(nn.Parameter(weight, parameter.requires_grad), parameter)
                    module._parameters[name] = drawn[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    dtype = buffer.dtype if as_built else at_work(buffer.dtype)
                    module._buffers[name] = marked(buffer.to(device, dtype), buffer)
        for module, its in zip(twin.modules(), self.bare.modules(), strict=False):
            module.training = trains and (its.training or not self.bare.training)
        return twin


def _is_ours(hook: Any) -> bool:
    """Whether a hook was registered by this package when layers were cut."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_OURS)


def marked(tensor: TensorKind, like: Tensor) -> TensorKind:
    """Copy the attributes that users have set on tensor `like` to a tensor, and return it."""
    vars(tensor).update(marks_of(like))
    return tensor


def draw_weight(name: str, like: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draw a random weight that about preserves the magnitude of activations (uniform, by fan-in)."""
    drawn = torch.empty(like.shape, dtype=at_work(like.dtype), device=device)
    if not drawn.is_floating_point():
        return drawn.zero_()
    if like.dim() < 2:
        return drawn.uniform_(-0.5, 0.5, generator=generator).add_(0.0 if "bias" in name else 1.0)
    fan = max(like.shape[1:]) if like.dim() == 3 else prod(like.shape[1:])
    bound = (3 / max(fan, 1)) ** 0.5
    return drawn.uniform_(-bound, bound, generator=generator)


def other_numbers(tensor: Tensor, factor: float) -> Tensor:
    """Return other values for a control tensor, by a factor: 0 and 1 swapped, -0.5, or shifted by 1; flags inverted."""
    if tensor.dtype is torch.bool:
        return ~tensor if factor < 1 else tensor
    if factor < 1:
        return (tensor != 1).to(tensor.dtype)
    if tensor.is_floating_point():
        return torch.full_like(tensor, -0.5) if factor < 100 else tensor + 1
    return tensor + (1 if factor < 100 else -1)


_MOST = 10_000
"""Maximum number of objects visited."""


def require_held_once(block: nn.Module, layers: Collection[nn.Module]) -> None:
    """Raise `MisfitError` if a block refers to `layers` that are cut, or to their weights, in other places too."""
    walk = _AttributeSearch(block, layers)
    if not layers:
        return
    for path, module in block.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in OF_TORCH}
        for key, value in (*own.items(), *((key, vars(module)[key]) for key in HOOKS)):
            if what := walk.find(value, is_shared=False):
                raise MisfitError(f"{f'{path}.{key}'.lstrip('.')!r} holds {what} beside its modules")


class _AttributeSearch:
    """Search through the attributes of modules, not descending into modules."""

    def __init__(self, block: nn.Module, layers: Collection[nn.Module]) -> None:
        self._modules = {id(module): path or "the block" for path, module in block.named_modules()}
        of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
        self._weights = {id(p): name for name, p in block.named_parameters() if id(p) in of_layers}
        self._layers = set(map(id, layers))
        self._seen: dict[tuple[int, bool], Any] = {}

    def find(self, thing: Any, *, is_shared: bool) -> str:
        """Return the name of a layer or weight that an object refers to, or ""; `is_shared`: deep copies share it."""
        key = id(thing), is_shared
        if isinstance(thing, PLAIN_TYPES) or key in self._seen or len(self._seen) > _MOST:
            return ""
        self._seen[key] = thing
        if isinstance(thing, nn.Parameter):
            return self._weights.get(id(thing), "")
        if isinstance(thing, nn.Module):
            is_found = id(thing) in self._layers or (is_shared and id(thing) in self._modules)
            return self._modules.get(id(thing), "") if is_found else ""
        is_shared = is_shared or isinstance(thing, FunctionType)
        return next(filter(None, (self.find(part, is_shared=is_shared) for part in _parts(thing))), "")


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, FunctionType):
        return (
            ()
            if is_of_library(thing)
            else (*ClosureCells(thing).read_values().values(), *defaults_of(thing), vars(thing))
        )
    if isinstance(thing, MethodType) and isinstance(thing.__self__, nn.Module):
        return ()
    if isinstance(thing, tuple | MethodType | partial):
        return (part for _, part in parts_of(thing) or ())
    if isinstance(thing, dict):
        return dict.values(thing)
    if isinstance(thing, list | set | frozenset):
        return thing
    return () if isinstance(thing, type) or is_of_library(type(thing)) else attributes_of(thing).values()
