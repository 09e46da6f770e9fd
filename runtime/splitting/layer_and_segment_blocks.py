"""Blocks of a split model: layers as they are, and segments of the code before, between and after them.

    stage ──▶ LayerBlock    hidden ─▶ the arguments in the model's forward ─▶ the layer, its names as they are
          ──▶ Segment       hidden ─▶ the model's forward, in which the block's own modules are real

A block's weights are the model's own modules. The forward that leads to them runs on a frame, without weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quintsched.errors import MisfitError, UsageError, suggest

from ..blocks.block_builders import Carry
from ..blocks.without_side_effects import asks_for_graph
from ..comm.torch_modes import recordable
from .adapters import router_losses
from .adapters.transformers_sharded_attention import Sight, look_here, seeing
from .find_layers import shallow_copy
from .layer_dataflow import SpanWalk, hidden_of
from .shared_forward_context import Origin, as_meta, computable
from .weightless_model import ModelFrame, needed


class _LayerReference:
    """Reference to the layer of the model that a block runs; it is not registered as a submodule."""

    has_what_block_has = True
    """The layer's attributes are the block's: blocks are compared without it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


class _LayerBlock:
    """Mixin for a layer's class: it is called as a block, and calls the layer as the model's forward does."""

    _origin: Origin
    _number: int
    _itself: _LayerReference
    training: bool

    def _run(self, hidden: Tensor, given: dict[str, Any]) -> Tensor | Carry:
        origin = self._origin
        call = origin.spans[self._number].calls.start
        with _seeing(self, origin.frame, sight := origin.sight_of(given)):
            training = origin.is_training(self.training)
            (args, kwargs), modes = origin.arguments(self._number, hidden, given, sight, training=training)
            with (
                nullcontext() if modes is None else modes.entered(),
                router_losses.collecting(wanted=origin.has_routers) as logits,
            ):
                try:
                    left = hidden_of(origin.flow.results[call], self._forward(*args, **kwargs))
                except Exception as error:
                    looks_at_numbers = hidden.is_meta and not asks_for_graph(error)
                    if not looks_at_numbers or not origin.flow.keeps[call] or (origin.has_routers and not logits):
                        raise
                    left = torch.empty_like(hidden)
        left = recordable(left)
        return Carry(left, **{router_losses.rider(call): router_losses.joined(logits, len(hidden))}) if logits else left

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, on the original layer unless this is a copy: its code may check identity."""
        layer = self._itself.layer
        if vars(self) is vars(layer):
            return type(layer).forward(layer, *args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def layer_block(model: nn.Module, origin: Origin, number: int) -> nn.Module:
    """Return block `number`: the layer, in a form that is called as a block.

    Both share one `__dict__`: attributes that user code sets in the layer are those of the block, and vice versa.
    """
    span, flow = origin.spans[number], origin.flow
    layer = model.get_submodule(flow.calls[span.calls.start])
    block = shallow_copy(layer)
    if "forward" in vars(layer):
        raise MisfitError(
            f"the forward of {type(layer).__name__} {flow.calls[span.calls.start]!r} was put in place of its class's; "
            "take such hooks off before the model is split"
        )
    object.__setattr__(block, "__dict__", vars(layer))
    kind: Any = block_class(type(layer), _LayerBlock, origin.takes(number))  # type: ignore[arg-type]
    own = {"_origin": origin, "_number": number, "_itself": _LayerReference(layer)}
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **own}
    block.__class__ = type(kind.__name__, (kind,), body)
    return block


@cache
def block_class(kind: type, role: type, takes: tuple[str, ...]) -> type:
    """Return a class of blocks whose forward names in its signature the extras that a stage passes."""

    def forward(self: Any, given: Any, /, **extras: Any) -> Any:
        return self._run(given, extras)

    kinds = inspect.Parameter
    named = [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in takes]
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [kinds("self", kinds.POSITIONAL_ONLY), kinds("given", kinds.POSITIONAL_ONLY), *named]
    )
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    return type(kind.__name__, (kind,) if role is object else (role, kind), body)


def _seeing(block: Any, frame: ModelFrame, sight: Sight | None) -> AbstractContextManager[None]:
    """Set, within a context, the reach of the attentions of a block and of the forward that leads to it."""
    if sight is not None:
        look_here((*block.modules(), *frame.root.modules()))
    return seeing(sight)


def segment(model: nn.Module, origin: Origin, number: int) -> nn.Module:
    """Return block `number`, which is more than one layer."""
    block = MultiLayerBlock(model, origin, number)
    block.__class__ = block_class(MultiLayerBlock, object, origin.takes(number))
    return block


class MultiLayerBlock(nn.Module):
    """A block that is more than one layer; its modules have the names that they have in the model.

    Args:
        model: the model whose modules they are.
        origin: the context that the model's blocks share.
        number: of the block.
    """

    def __init__(self, model: nn.Module, origin: Origin, number: int) -> None:
        super().__init__()
        self._origin, self._number = origin, number
        span, flow = origin.spans[number], origin.flow
        layers = [flow.calls[call] for call in span.calls]
        names = outermost([*layers, *(name for phase in span.phases for name in flow.beside[phase])])
        take(self, names, model)
        self._place = _ModuleSlots(origin.frame.copy(), [name for name in names if name not in layers])
        origin.frames.append(self._place.frame)
        weights = {name for phase in span.phases for name in flow.weights[phase]} | origin.buffers_read(number)
        weights |= set(origin.unused) if span.is_last else set()
        self._weights = sorted(name for name in weights if not name.startswith(tuple(f"{n}." for n in names)))
        take(self, self._weights, model)
        self.training = model.training

    def _run(self, given: Any, extras: dict[str, Any]) -> Any:
        """Run the block's part of the model's forward."""
        origin, sight = self._origin, self._origin.sight_of(extras)
        if origin.pools and origin.spans[self._number].is_last and sight is not None and sight.context is not None:
            whole, sight = sight.context.whole, None
            given, extras = tree_map_only(Tensor, whole, (given, {**extras, "context": None}))
        with _seeing(self, self._place.frame, sight):
            made = self._run_seeing(given, extras, sight)
        return made if torch.is_inference_mode_enabled() else recordable(made)

    def _run_seeing(self, given: Any, extras: dict[str, Any], sight: Sight | None) -> Any:
        origin, span = self._origin, self._origin.spans[self._number]
        inputs = origin.inputs_of(extras)
        if span.is_first:
            inputs = {**inputs, **self._named(given, inputs)}
            if missing := [n for n in needed(origin.frame.root) if n not in inputs and n not in origin.settings]:
                raise MisfitError(
                    f"the model takes {', '.join(missing)} beside {', '.join(inputs)}: engine.step(inputs, targets, "
                    f"{', '.join(f'{name}=…' for name in missing)})"
                )
        like = next(value for value in (inputs.values() if span.is_first else [given]) if isinstance(value, Tensor))
        self._settle(is_meta=like.is_meta)
        riders = {rider.name: extras[rider.name] for rider in origin.flow.riders if extras.get(rider.name) is not None}
        walk = _SegmentWalk(self, computable(like).device, None if span.is_first else computable(given), riders)
        walk.records = like.is_meta and torch.is_grad_enabled()
        if origin.has_routers and span.is_last:
            walk.logits = {
                call: computable(extras.get(router_losses.rider(call))) for call in range(len(origin.flow.calls))
            }
        asked = {router_losses.ASKS: True} if walk.logits is not None else {}
        output = walk.go(origin.called_with(inputs, like, sight, is_first=span.is_first) | asked)
        if span.is_last:
            selected = origin.select(output)
            selected = as_meta(selected) if like.is_meta else selected
            return Carry(selected) if isinstance(selected, tuple) else selected
        beside = {**walk.made, **self._carried(inputs, extras)}
        assert walk.left is not None
        left = as_meta(walk.left) if like.is_meta else walk.left
        return Carry(left, **(as_meta(beside) if like.is_meta else beside)) if beside else left

    def _named(self, given: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's inputs by name from a batch: a tensor is the first of them, a mapping has all."""
        origin = self._origin
        if not isinstance(given, Mapping):
            return {origin.inputs[0]: given}
        for name in given:
            if name not in origin.inputs and name not in TARGET_NAMES:
                raise UsageError(
                    f"a batch has {name!r}, which the model's forward does not take{suggest(name, origin.inputs)}"
                )
        return origin.inputs_of(given)

    def _carried(self, inputs: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that later blocks need, except those passed to them as extras."""
        if not self._origin.spans[self._number].is_first:
            return {}
        kept = {name: value for name, value in inputs.items() if extras.get(name) is None}
        return {name: value for name, value in kept.items() if name not in self._origin.uncarried}

    def _settle(self, *, is_meta: bool) -> None:
        """Put the block's modules into the frame as they are now; where only shapes matter, the frame's own."""
        frame = self._place.frame
        for name, parent, key, stand_in in self._place.slots:
            parent._modules[key] = stand_in if is_meta else self.get_submodule(name)
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        if dtype is not None:
            frame.cast(dtype)
        _show_weights(frame, self, self._weights, is_meta=is_meta)


class _ModuleSlots:
    """A frame with slots for a block's own modules, without registering them; copies of a block share it."""

    def __init__(self, frame: ModelFrame, names: Sequence[str]) -> None:
        self.frame = frame
        places = [(name, *place) for name in names for place in frame.places(name)]
        self.slots = [(name, parent, key, parent._modules[key]) for name, parent, key in places]

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleSlots:
        return self


TARGET_NAMES = ("labels", "targets", "label", "label_ids", "start_positions", "end_positions")
"""Names of a batch that are for the loss, beside the model's inputs."""


class _SegmentWalk(SpanWalk):
    def __init__(
        self, block: MultiLayerBlock, device: torch.device, hidden: Tensor | None, riders: dict[str, Any]
    ) -> None:
        origin = block._origin
        taken = {name: computable(rider) for name, rider in riders.items()}
        super().__init__(block._place.frame, device, origin.flow, block._number, origin.spans, hidden, taken)
        self._block = block
        self.logits: Mapping[int, Tensor | None] | None = None
        """Router logits by call, where the output includes their loss."""

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call; router logits of another stage are collected as if it had run here."""
        logits = None if self.logits is None or number in self.span.calls else self.logits[number]
        if logits is not None:
            router_losses.give(logits)
        return super().layer(layer, number, args, kwargs)

    def is_training(self) -> bool:
        return self._block._origin.is_training(self._block.training)

    def weight(self, owner: nn.Module, name: str, parameter: Tensor) -> Tensor:
        name_in_model = f"{self.frame.name_of(owner)}.{name}".removeprefix(".")
        self._require_own(name_in_model, dict(self._block.named_parameters(remove_duplicate=False)))
        return super().weight(owner, name, parameter)

    def beside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(True for _ in module.parameters()):
            name = self.frame.name_of(module)
            self._require_own(
                name, [name for slot, *_ in self._block._place.slots if f"{name}.".startswith(f"{slot}.")]
            )
            if self.records and self.calls in self.span.phases:
                module = self._block.get_submodule(name)
        return super().beside(module, args, kwargs)

    def _require_own(self, name: str, own: Collection[str]) -> None:
        """Raise `MisfitError` where the block's part of the forward uses a module or weight of another block."""
        if self.calls in self.span.phases and name not in own:
            raise MisfitError(
                f"the forward of {type(self.frame.root).__name__} uses {name!r} in this step, which the example of the "
                "split did not lead to, so that this block has it not: an input that is left out, or another one, "
                "steers it; let the forward use both in each step (torch.where), or split the model again for such "
                "steps, split(model, example=…)"
            )

    def called(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._block.get_submodule(self.flow.calls[number])
        if not any(p.is_meta for p in own.parameters()):
            return own(*args, **kwargs)
        return self.filled(self.on_meta(own, args, kwargs))


def outermost(names: Iterable[str]) -> list[str]:
    """Return the names of modules that none of the others contains."""
    found = dict.fromkeys(names)
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _show_weights(frame: ModelFrame, block: nn.Module, names: Iterable[str], *, is_meta: bool) -> None:
    """Make a block's weights visible to code on a frame, and, unless only shapes matter, its buffers."""
    for name in names:
        owner, _, key = name.rpartition(".")
        mine, place = block.get_submodule(owner), frame.root.get_submodule(owner)
        if key in mine._parameters:
            place._parameters[key] = mine._parameters[key]
        elif not is_meta:
            place._buffers[key] = mine._buffers[key]


def take(
    block: nn.Module, names: Iterable[str], model: nn.Module, others: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Register modules, weights, buffers of a model, or `others`, in a block, under their names there."""
    for name in names:
        *owners, key = name.split(".")
        owner, its = block, model
        for part in owners:
            its = its.get_submodule(part)
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        found = others[name] if name in others else getattr(its, key)
        if isinstance(found, nn.Module):
            owner.add_module(key, found)
        elif isinstance(found, nn.Parameter):
            owner.register_parameter(key, found)
        else:
            is_saved = key in its._buffers and key not in its._non_persistent_buffers_set
            owner.register_buffer(key, found, persistent=is_saved)
