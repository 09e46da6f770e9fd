"""Context shared by the blocks of a split model: its forward without weights, and the arguments of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quintsched.errors import MisfitError

from ..blocks.state_dict_entries import saved_tensors
from ..comm.random_generators import draws_undone
from ..comm.torch_modes import Modes
from ..user_objects.changes_since_split import SPLIT_AGAIN, Followed, tensors_in
from ..user_objects.library_or_user import is_of_library
from .adapters import router_losses, transformers_inputs_and_losses
from .adapters.transformers_sharded_attention import Sight
from .find_values_for_later_layers import CarriedValues
from .layer_dataflow import HIDDEN, CallArguments, SpanWalk, Stop, replaced
from .weightless_model import ModelFrame, in_graph


class Origin:
    """Context that the blocks of a model share (see `layer_dataflow`).

    Args:
        frame: the model's forward, without weights.
        found: the record of it.
        inputs: names of the inputs that the forward takes, the first one first.
        settings: further arguments of the forward.
        select: function to the part of the model's output that the last block returns.
        sees: whether its attentions can reach beyond a slice of a sequence.
        pools: whether it returns one output per sequence, for which the last block needs all of it.
        has_routers: whether its loss has a part of its routers, whose logits travel to the last block.

    Attributes:
        flow: data flow between its layers.
        spans: range of the model in each block.
        uncarried: inputs that no later block needs, as samples on the meta device.
        unused: names of weights and saved buffers that no block uses; the last one has them, to be saved with the rest.
        frames: the frames in which the forward runs: its own, and those of blocks.
        evaluates: see `SharedOrigin`.
    """

    def __init__(
        self,
        frame: ModelFrame,
        found: CarriedValues,
        inputs: Sequence[str],
        settings: Mapping[str, Any],
        select: Callable[[Any], Any],
        sees: bool = False,
        pools: bool = False,
        has_routers: bool = False,
    ) -> None:
        self.frame, self.flow, self.spans = frame, found.flow, tuple(found.spans)
        self.inputs, self.settings, self.select = tuple(inputs), dict(settings), select
        self.sees, self.pools, self.has_routers = sees, pools, has_routers
        self.unused: list[str] = []
        self.uncarried = found.unneeded
        self.frames = [frame]
        self.evaluates: bool | None = None
        self._watched: tuple[Followed, Callable[[nn.Module], CarriedValues]] | None = None
        self._is_theirs = is_of_library(type(frame.root))
        self._modes: dict[tuple[int, ...], Modes | None] = {}
        self._numbers: dict[int, int] = {}
        self._held: dict[str, Tensor] = {}
        self._last: tuple[Sequence[Any], torch.dtype, dict[int, CallArguments]] = ((), torch.float32, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def watch(self, model: nn.Module, search: Callable[[nn.Module], CarriedValues]) -> None:
        """Watch the host state that a model's forward reads; `search` records the forward again when it has changed."""
        self._watched = Followed(model, self.frame.followed), search
        self.frame.flags = self._watched[0].flags
        named = dict(model.named_buffers(remove_duplicate=False))
        read = dict.fromkeys(chain.from_iterable((*self.flow.buffers, *self.flow.weights)))
        self._held = {name: named[name] for name in read if name in named}

    def is_layer(self, number: int) -> bool:
        """Whether a block is exactly one layer."""
        span, flow = self.spans[number], self.flow
        is_alone = not any(flow.beside[phase] or flow.weights[phase] or flow.buffers[phase] for phase in span.phases)
        makes_riders = any(rider.source == number for rider in flow.riders)
        is_passed_buffers = any(flow.arguments[call] is None for call in span.calls) and self.buffers_read(number)
        return is_alone and not (makes_riders or is_passed_buffers or span.is_first or span.is_last)

    def buffers_read(self, number: int) -> set[str]:
        """Return the names of saved buffers that a block's forward reads outside its layers.

        Its forward begins with the code of the blocks before it, up to the arguments of its own layers.
        """
        span, flow = self.spans[number], self.flow
        phases = range(max(span.phases.stop, span.calls.stop))
        names = set(chain.from_iterable(flow.buffers[phase] for phase in phases))
        for name in chain.from_iterable(flow.beside[phase] for phase in phases):
            module = self.frame.root.get_submodule(name)
            if not any(True for _ in module.parameters()):
                names |= {f"{name}.{key}" for key in saved_tensors(module)}
        return names

    def tensors_read(self) -> list[Tensor]:
        """Return the tensors in containers and objects that code between layers reads."""
        return [] if self._watched is None else self._watched[0].tensors()

    def follow_model(self) -> None:
        """Update the forward to the model's present host state; raises `MisfitError` where it does something else."""
        if self._watched is None or (model := self._watched[0].model()) is None:
            return
        for name, held in self._held.items():  # blocks hold these themselves
            if (now := model.get_buffer(name)).shape != held.shape:
                raise MisfitError(f"{name!r} has another shape than when the model was split; {SPLIT_AGAIN}")
            if now is not held:
                held.copy_(now)
        followed, search = self._watched
        followed.require_same_structure()
        versions = self._versions(model)
        changed = followed.changed()
        if versions != self._numbers:
            self._numbers = versions
            for frame in self.frames:
                frame.follow_tensors(model)
            self._last = ((), torch.float32, {})
        if changed is None:
            return
        for frame in self.frames:
            followed.copy_attributes(frame.root)
            frame.follow_tensors(model)
        followed.record_state()
        says = f"{changed} is no longer what it was when the {type(model).__name__} was split"
        with draws_undone():
            try:
                found = search(model)
            except MisfitError as error:
                raise MisfitError(f"{says}: {error}") from error
        if not self.flow.is_like(found.flow) or self.uncarried.keys() != found.unneeded.keys():
            raise MisfitError(f"{says}, and steers what its forward does; {SPLIT_AGAIN}")
        self.flow.arguments = found.flow.arguments
        self._modes.clear()
        self._last = ((), torch.float32, {})

    def _versions(self, model: nn.Module) -> dict[int, int]:
        held = (tensors_in(model.get_submodule(name)).values() for name in self.frame.followed)
        return {id(tensor): tensor._version for tensors in held for tensor in tensors if not tensor.is_inference()}

    def is_training(self, block: bool) -> bool:
        """Whether code between layers trains in a block, whose own training flag is `block`: user code may set it."""
        return block if self.evaluates is None else not self.evaluates

    def takes(self, number: int) -> tuple[str, ...]:
        """Return the names of extras that block `number` takes besides the hidden state."""
        calls = self.spans[number].calls
        riders = (r.name for r in self.flow.riders if any(call in calls for call, _ in r.takers))
        of_routers = range(len(self.flow.calls)) if self.has_routers and self.spans[number].is_last else ()
        return (
            *self.inputs,
            *riders,
            *map(router_losses.rider, of_routers),
            *(("context", "past") if self.sees else ()),
        )

    def inputs_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a block's extras that are inputs of the model."""
        return {name: value for name, value in given.items() if name in self.inputs and value is not None}

    def sight_of(self, given: Mapping[str, Any]) -> Sight | None:
        """Return the reach of attentions beyond a slice, where a block is passed one."""
        context, past = given.get("context"), given.get("past")
        if self.has_routers and (context is not None or past is not None):
            raise MisfitError(
                "output_router_logits adds a loss of all tokens to the model's own, but sequences are cut into slices "
                "(cp, slices); set config.output_router_logits = False, or use another mesh"
            )
        return None if context is None and past is None else Sight(context, past)

    def arguments(
        self, number: int, hidden: Tensor, given: Mapping[str, Any], sight: Sight | None, *, training: bool = False
    ) -> tuple[CallArguments, Modes | None]:
        """Return the arguments of the layer that is all of block `number`, and modes if others are around it."""
        call, inputs = self.spans[number].calls.start, self.inputs_of(given)
        plain, modes, flags = self.flow.arguments[call], self.flow.modes[call], tuple(self.frame.flags().values())
        is_as_found = self._is_theirs or (training and all(flags))
        if plain is not None and sight is None and inputs.keys() <= {self.inputs[0]} and is_as_found:
            return _with_hidden(plain, hidden), modes
        if not is_as_found:
            key = call, training, *flags
            if key not in self._modes:
                with torch.enable_grad():
                    self._modes[key] = self._walk(number, hidden, inputs, sight, on=False, training=training).modes
            modes = self._modes[key]
        riders = {place: given[r.name] for r in self.flow.riders for at, place in r.takers if at == call}
        if hidden.is_meta or not self.flow.repeats[call]:
            found = self._found(hidden, self._walk(number, hidden, inputs, sight, on=False, training=training))[call]
        else:
            found = self._remembered(number, hidden, inputs, sight, training)[call]
        args, kwargs = replaced(_with_hidden(found, hidden), riders)
        return (args, kwargs), modes

    def _remembered(
        self, number: int, hidden: Tensor, inputs: dict[str, Any], sight: Sight | None, training: bool
    ) -> dict[int, CallArguments]:
        """Return arguments of this and later calls: from the last walk, if it had the same inputs."""
        old, dtype, calls = self._last
        key = (training, *inputs.keys(), *inputs.values(), *(() if sight is None else (sight.context, sight.past)))
        is_same = len(old) == len(key) and all(map(is_, old, key))
        if not is_same or dtype != hidden.dtype or self.spans[number].calls.start not in calls:
            with torch.no_grad():
                calls = self._found(hidden, self._walk(number, hidden, inputs, sight, on=True, training=training))
            self._last = (key, hidden.dtype, calls)
        return calls

    def _walk(
        self,
        number: int,
        hidden: Tensor,
        inputs: Mapping[str, Any],
        sight: Sight | None,
        *,
        on: bool,
        training: bool = False,
    ) -> _ArgumentsWalk:
        self.frame.cast(hidden.dtype)
        walk = _ArgumentsWalk(self, number, computable(hidden), on, training)
        walk.go(self.called_with(inputs, hidden, sight))
        return walk

    def _found(self, hidden: Tensor, walk: _ArgumentsWalk) -> dict[int, CallArguments]:
        places = {at: {self.flow.entries[at]: HIDDEN} for at in walk.found if self.flow.repeats[at]}
        found = {at: replaced(call, places.get(at, {})) for at, call in walk.found.items()}
        return as_meta(found) if hidden.is_meta else found

    def called_with(
        self, inputs: Mapping[str, Any], like: Tensor, sight: Sight | None, *, is_first: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of the forward for a batch of as many samples as `like` has.

        Of `uncarried` inputs the first block gets the actual ones, and later ones stand-ins.
        """
        device = computable(like).device
        stand_ins = {
            name: torch.full((like.shape[0], *sample.shape[1:]), torch.nan, dtype=sample.dtype, device=device)
            for name, sample in self.uncarried.items()
            if name not in inputs and not is_first
        }
        called = {**self.settings, **tree_map(computable, dict(inputs)), **stand_ins}
        if sight is not None:
            return {**called, **self._of_slice(called, sight)}
        return {**called, **transformers_inputs_and_losses.unpacked(self.frame.root, called)} if self.sees else called

    def _of_slice(self, called: Mapping[str, Any], sight: Sight) -> dict[str, Any]:
        """Return the arguments that place the tokens of a slice in their sequences."""
        ids = called[self.inputs[0]]
        samples, length = ids.shape[:2]
        told: dict[str, Any] = {}
        if called.get("position_ids") is None:
            told["position_ids"] = sight.positions(length, ids.device).expand(samples, -1)
        elif called.get("attention_mask") is None and transformers_inputs_and_losses.reads_packed(self.frame.root):
            raise MisfitError(
                "position_ids are given where sequences are cut into slices (cp, slices), and without a cache a model "
                "may read several sequences out of them, each by itself, which attention over slices cannot; set "
                "config.use_cache = True before it is split, so that they are positions, or leave them out"
            )
        if called.get("attention_mask") is None:
            sight.all_seen = told["attention_mask"] = ids.new_ones((samples, length), dtype=torch.bool)
        return {name: value for name, value in told.items() if name in self.inputs}


class _ArgumentsWalk(SpanWalk):
    """Finds the arguments of a layer; if it goes `on`, those of later ones too, with the same hidden state.

    Attributes:
        found: arguments by the number of the call.
        modes: those at the block's own call, as in `Flow`.
    """

    def __init__(self, origin: Origin, number: int, hidden: Tensor, on: bool, training: bool) -> None:
        super().__init__(origin.frame, hidden.device, origin.flow, number, origin.spans, hidden, {})
        self._on, self._training = on, training
        self.found: dict[int, CallArguments] = {}
        self.modes: Modes | None = None

    def is_training(self) -> bool:
        return self._training

    def called(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.found[number], self.modes = (args, kwargs), Modes.now().apart_from(self._around)
        if not self._on:
            raise Stop
        assert self.left is not None
        return self.flow.results[number].rebuilt(self.left, (args, kwargs))

    def passed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.found[number] = (args, kwargs)
        self.is_done = number == len(self.flow.calls) - 1


def _with_hidden(call: CallArguments, hidden: Tensor) -> CallArguments:
    args, kwargs = tree_map(lambda leaf: hidden if leaf is HIDDEN else leaf, call)
    return args, kwargs


def computable(leaf: Any) -> Any:
    """Return a leaf that can be computed with: ones for a tensor of the meta device, where only shapes matter."""
    is_meta = isinstance(leaf, Tensor) and leaf.is_meta
    return in_graph(torch.ones(leaf.shape, dtype=leaf.dtype), leaf) if is_meta else leaf


def as_meta(tree: Any) -> Any:
    """Return a tree with its tensors on the meta device."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)
