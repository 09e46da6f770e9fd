"""Shape inference of the tensors sent between stages: on the meta device without data, by each rank for itself.

The same run finds in-place mutations of block inputs, by torch's version counters. Within a stage, autograd
handles these. At a stage's border, where the input is a received message, or where blocks are recomputed, the block
mutates a copy. An input that shares its storage would have to change too, and is refused (see `stage.in_place_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError
from quintsched.stalls.own_error_or_lost_peer import said

from ..comm.random_generators import draws_undone
from ..comm.torch_modes import ModesLeftError
from ..user_objects.host_value_equality import is_same
from ..user_objects.library_or_user import PLAIN_TYPES
from ..user_objects.snapshot import Snapshot, UntriedError, label_in, require_no_iterator, require_undone
from .block_builders import (
    TARGETS,
    Blocks,
    InputMutation,
    MutatedState,
    Parcel,
    accepted_extras,
    needed_extras,
    on_meta,
    split_result,
    typed,
)
from .dtensor import before_fully_shard
from .failing_submodule_from_traceback import place_of
from .trees import DIFFERENTIABLE, Tensors, TensorSpec, TreeSpec, attribute_of, tensors_of
from .without_side_effects import BlockResult, as_leaves, attributes_untouched, run_block

_ONLY_TENSORS = "only tensors ride along: encode it as one, as the number of a task, for each sample"

HAND_ON = "pass it on in the forward, as an argument or output of layers, or return an auxiliary loss"
"""Advice in errors about values that blocks of several stages, or the loss, pass on through shared objects."""


def trace_shapes(
    blocks: Blocks,
    inputs: TreeSpec,
    extras: Mapping[str, TreeSpec],
    dtype: torch.dtype | None = None,
    results: Sequence[tuple[BlockResult, Sequence[MutatedState]]] = (),
    marks: Mapping[int, Sequence[tuple[str, str | int, Any]]] = MappingProxyType({}),
) -> list[Parcel]:
    """Return the output specs of every block for one microbatch, inferred on the meta device: no data, no memory.

    `dtype` is that of the weights; None leaves them as built. `results`, if given, are results of `run_block` on the
    meta device with their side effects, and the blocks are not run. `marks` replace host state before a block runs:
    by block number, the owner and key (see `MutatedState`) and the value. Raises `MisfitError` that names the block
    that cannot take the output of the one before.
    """
    given, beside = inputs.empty("meta"), {name: spec.empty("meta") for name, spec in extras.items()}
    watch, left, riders = InPlace(), list[Parcel](), dict[str, _Ride]()
    for number, module in enumerate(map(on_meta, blocks)):
        taken = _taken(number, module, beside, riders)
        watch.arrive(given, {**beside, **{name: ride.tensor for name, ride in riders.items()}})
        bare = before_fully_shard(module)
        weights = {name: tensor.to("meta", kind) for name, tensor, kind in typed(bare, dtype)}
        watch.hold(weights.values())
        buffers = [(name, weights[name], weights[name]._version) for name, _ in bare.named_buffers() if name in weights]
        run, name = partial(_run, bare, weights), f"block {number} ({type(module).__name__})"
        try:
            with draws_undone(), attributes_untouched(module) as before:
                require_undone(before, name)
                for place in marks.get(number, ()):
                    before.put(*place)
                call = None if results else partial(run_block, run, given, taken, name)
                found, state = results[number] if call is None else (call(), ())
                changed = [*changed_by(before, name, call), *_rebound(bare, buffers, weights)]
                (given, fresh, auxiliary), records = found
        except (ModesLeftError, UntriedError):
            raise
        except Exception as error:
            hint = _hint(error, [earlier.state for earlier in left])
            raise MisfitError(_cannot_take(number, module, given, taken, error) + hint) from error
        watch.note_mutations(number)
        spec, has_loss = _spec_of_output(number, module, given), auxiliary is not None
        for name, tensor in fresh.items():
            if name in (*beside, *riders, TARGETS):
                raise MisfitError(f"block {number} sends {name!r} along, but there is something else of that name")
            _require_tensor(number, module, tensor, f"sends {name!r} along, {{}}; {_ONLY_TENSORS}")
            riders[name] = _Ride(tensor, number, number)
        is_resident = watch.holds([*tensors_of(given), *fresh.values()])
        state = tuple(dict.fromkeys([*state, *changed]))
        left.append(Parcel(spec, (), has_loss, is_resident, (), records, state, _besides(given, fresh, beside)))
    if riders:
        _require_takers(riders)
    return [
        replace(
            parcel,
            riders=tuple((n, TensorSpec.from_tensor(r.tensor)) for n, r in riders.items() if r.since <= k < r.until),
            changes=watch.changes(k),
            strides=watch.strides(k),
        )
        for k, parcel in enumerate(left)
    ]


def _require_takers(riders: Mapping[str, _Ride]) -> None:
    for name, ride in riders.items():
        if ride.until == ride.since:
            raise MisfitError(f"block {ride.since} sends {name!r} along, and no later block takes it")


class Graphs(NamedTuple):
    """Output tensors and riders of the last block, with their autograd graphs; and the parameters of all blocks."""

    output: Tensors
    riders: dict[str, Tensor]
    weights: list[Tensor]


def trace_graphs(
    blocks: Blocks,
    trained: Sequence[bool] | None,
    inputs: TreeSpec,
    extras: Mapping[str, TreeSpec],
    dtype: torch.dtype | None = None,
) -> Graphs | None:
    """Return the outputs of blocks on the meta device, with graphs; `trained` flags the parameters (None: all).

    None if a block cannot run without data. If no output of a block requires a gradient even where all its inputs and
    parameters do, as in a layer that works on numbers, its outputs are made leaf tensors: the graph begins there.
    """
    given, riders, flags = inputs.empty("meta"), dict[str, Tensor](), iter(trained or ())
    beside, weights = {name: spec.empty("meta") for name, spec in extras.items()}, list[Tensor]()
    try:
        for number, block in enumerate(blocks):
            module = on_meta(block)
            taken = _taken(number, module, beside, {name: _Ride(t, number, number) for name, t in riders.items()})
            own = [p.dtype in DIFFERENTIABLE if trained is None else next(flags) for p in module.parameters()]
            left, fresh, its = _leave(module, own, given, taken, dtype)
            if not _require_gradients(left, fresh):
                could = _leave(module, [True] * len(own), as_leaves(given), as_leaves(taken), dtype)
                has_hooks = any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules())
                is_blind = not _require_gradients(*could[:2])
                if is_blind and (any(own) or _require_gradients(given, taken) or has_hooks):
                    left, fresh = as_leaves(left), as_leaves(fresh)
            given, riders, weights = left, riders | fresh, weights + its
    except Exception:
        return None
    return Graphs(tensors_of(given), riders, weights)


def _require_gradients(given: Any, beside: Mapping[str, Any]) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of([given, *beside.values()]))


def _leave(
    module: nn.Module, trained: Sequence[bool], given: Any, taken: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    """Return a block's output and riders on the meta device, with graphs; and its parameters."""
    bare, made = before_fully_shard(module), dict[int, Tensor]()
    weights = {n: made.setdefault(id(t), t.detach().to("meta", kind)) for n, t, kind in typed(bare, dtype)}
    own = [
        weights[name].requires_grad_(flag) for (name, _), flag in zip(module.named_parameters(), trained, strict=True)
    ]
    with draws_undone(), attributes_untouched(module), torch.enable_grad():
        left, fresh, _ = split_result(_run(bare, weights, given, taken))
    return left, fresh, own


def changed_by(before: Snapshot, block: str, again: Callable[[], object] | None = None) -> Iterator[MutatedState]:
    """Yield the side effects of a block since a snapshot: on its modules, and on objects that their code names.

    `again` runs the block once more: new state that the second run keeps is a cache, state that it makes anew is not.

    Raises `UntriedError` for an iterator that the block has made and keeps.
    """
    changes = [*before.changes()]
    made = {change.place: change.now for change in changes if change.was is None}
    kept = made.keys() if again is None or not made else _kept_again(before, made, again)
    for change in changes:
        require_no_iterator(block, change.name, change.now)
        owner, key = change.owner, change.place[1]
        if key is None:  # a tensor, in place
            owner, _, key = owner.rpartition(".")
        key, is_own = key if isinstance(key, str | int) else "", change.owner.startswith((".", " ("))
        counts = change.was is not None and isinstance(change.now, PLAIN_TYPES)  # growing lists are mostly logs
        yield MutatedState(
            change.owner if is_own else change.name,
            is_attribute=not is_own or change.owner.endswith(")"),
            is_named=counts and not is_own,
            owner=owner,
            key=key,
            said=change.owner if change.was is None and (isinstance(key, int) or key is change.now) else change.name,
            is_new=change.place in kept,
            counts=isinstance(change.now, int | str),
            holds=not isinstance(change.now, PLAIN_TYPES),
        )


def _kept_again(
    before: Snapshot, made: Mapping[tuple[int, Any], Any], again: Callable[[], object]
) -> Set[tuple[int, Any]]:
    """Return the places of new state that is the same after another run, in holders that did not grow."""
    try:
        again()
    except Exception:
        return made.keys()
    later = {change.place: change.now for change in before.changes() if change.was is None}
    growing = {holder for holder, key in later.keys() - made.keys()}
    return {place for place, now in made.items() if place[0] not in growing and is_same(later.get(place), now)}


def _rebound(bare: nn.Module, was: list[tuple[str, Tensor, int]], now: Mapping[str, Tensor]) -> Iterator[MutatedState]:
    """Yield the buffers that a block has rebound or mutated in `functional_call`."""
    for name, tensor, version in was:
        path, _, key = name.rpartition(".")
        if now[name] is not tensor or tensor._version != version:
            yield MutatedState(label_in(bare, path), is_attribute=False)
            owner = label_in(bare, path)
            yield MutatedState(said := f"{owner}.{key}", is_attribute=False, owner=owner, key=key, said=said)


def _taken(number: int, module: nn.Module, extras: Mapping[str, Any], riders: Mapping[str, _Ride]) -> dict[str, Any]:
    """Return the extras and riders that a block takes; raises `MisfitError` if a required argument is missing."""
    accepts = accepted_extras(module)
    taken = {name: extra for name, extra in extras.items() if accepts(name)}
    for name, ride in riders.items():
        if accepts(name):
            ride.until = number
            taken[name] = ride.tensor
    missing = [name for name in needed_extras(module) if name not in taken]
    if missing:
        raise MisfitError(
            f"block {number} ({type(module).__name__}) needs {missing[0]!r}, which no block sends along and the step "
            f"is not given: engine.step(inputs, targets, {missing[0]}=…), or give its parameter a default"
        )
    return taken


def _run(module: nn.Module, weights: dict[str, Tensor], given: Any, taken: Mapping[str, Any]) -> Any:
    """Run a block on the meta device. If it mixes CPU tensors that it makes with meta tensors, rerun it with
    `torch.device("meta")` as the default device.
    """
    try:
        return torch.func.functional_call(module, weights, (given,), dict(taken), tie_weights=False)
    except (RuntimeError, ValueError) as error:
        if "meta" not in str(error):
            raise
        try:
            with torch.device("meta"):
                return torch.func.functional_call(module, weights, (given,), dict(taken), tie_weights=False)
        except Exception:
            raise error from None


def _cannot_take(number: int, module: nn.Module, given: object, taken: Mapping[str, Any], error: Exception) -> str:
    """Return a message with the inputs on which a block raised an error, and the submodule that raised it."""
    return (
        f"block {number} cannot take {TreeSpec.from_tree(given)}: {said(error)} (in {place_of(error, number, module)}"
        f"{''.join(f', {name}=None' for name, extra in taken.items() if extra is None)}; shapes are found by running "
        "the blocks on torch's meta device)"
    )


def _hint(error: Exception, earlier: Sequence[Sequence[MutatedState]]) -> str:
    """Return advice where a block lacks an attribute or key that an earlier block has set as host state."""
    name = error.name if isinstance(error, AttributeError) else error.args[0] if isinstance(error, KeyError) else None
    setters = [number for number, states in enumerate(earlier) if name and any(s.key == name for s in states)]
    return f"; block {setters[0]} sets {name!r}, which other stages do not have: {HAND_ON}" if setters else ""


def wants_data(error: MisfitError) -> bool:
    """Whether shape inference failed as a block depends on data (`.item()`, masks) or does not support meta."""
    cause = error.__cause__
    words = "" if cause is None else str(cause).lower()
    return isinstance(cause, NotImplementedError) or "meta" in words or "tensor.__format__" in words


def lengthened(left: TreeSpec, tokens: Sequence[int], times: int) -> TreeSpec:
    """Return a block's output spec for `times` as many tokens, where meta cannot infer it. The spec `left` is that of a
    unit of `tokens`; the first dimension of that length, after the samples, is multiplied.
    """

    def longer(spec: TensorSpec) -> TensorSpec:
        dim = next((dim for dim in range(1, len(spec.shape)) if spec.shape[dim : dim + 1] == tuple(tokens)), None)
        if dim is None:
            return spec
        return TensorSpec((*spec.shape[:dim], spec.shape[dim] * times, *spec.shape[dim + 1 :]), spec.dtype)

    return TreeSpec(left.tree, tuple(map(longer, left.tensors)))


def _besides(
    given: object, fresh: Mapping[str, Tensor], extras: Mapping[str, Any]
) -> tuple[tuple[int | str, str], ...]:
    """Return, in words, properties of outputs, riders and extras that a send loses: subclass, attributes, leaf."""
    found = list[tuple[int | str, str]]()
    rows: tuple[tuple[int | str, object], ...] = (*enumerate(tensors_of(given)), *fresh.items(), *extras.items())
    for name, tensor in ((name, tensor) for name, tree in rows for tensor in tensors_of(tree)):
        if type(tensor).__module__.partition(".")[0] != "torch":
            found.append((name, f"is a {type(tensor).__name__}"))
        if (attribute := attribute_of(tensor)) is not None:
            found.append((name, f"has an attribute {attribute!r}"))
        if name in extras and tensor.requires_grad:
            found.append((name, "requires a gradient"))
    return tuple(found)


def _spec_of_output(number: int, block: nn.Module, output: object) -> TreeSpec:
    """Return the spec of a block's output; raises `MisfitError` if it has no tensors, or some that cannot be sent."""
    spec = TreeSpec.from_tree(output)
    if not spec.tensors:
        raise MisfitError(
            f"block {number} ({type(block).__name__}) returns {spec.tree}, in which there is no tensor; it must return "
            "a tensor, or tuples, lists, dicts or dataclasses of tensors, or one of these beside an auxiliary loss"
        )
    for path, tensor in zip(spec.tree.paths, tensors_of(output), strict=True):
        _require_tensor(number, block, tensor, f"returns {{}}{f' at {path}' if path else ''}, which cannot travel")
    return spec


def _require_tensor(number: int, block: nn.Module, found: object, words: str) -> None:
    """Raise `MisfitError` unless an object is a dense strided tensor, not quantized, nested or a DTensor."""
    if isinstance(found, Tensor) and not isinstance(found, DTensor):
        if found.layout is torch.strided and not found.is_quantized and not found.is_nested:
            return
        kind = f"a tensor of layout {found.layout}"
    else:
        kind = f"a {type(found).__name__}"
    raise MisfitError(f"block {number} ({type(block).__name__}) {words.format(kind)}")


@dataclass
class _Ride:
    """A rider: a tensor sent along from block `since` to block `until`."""

    tensor: Tensor
    since: int
    until: int


ArgumentKey = int | str


class InPlace:
    """Tracker of in-place mutations of each block's inputs, while a model runs on the meta device."""

    def __init__(self) -> None:
        self._arrived: list[dict[ArgumentKey, tuple[Tensor, int]]] = []
        self._changed: dict[tuple[int, ArgumentKey], int] = {}
        self._held: dict[int, Tensor] = {}

    def arrive(self, given: object, beside: Mapping[str, object]) -> None:
        """Record the versions of the next block's input tensors, and of the extras and riders that are tensors."""
        tensors: dict[ArgumentKey, Tensor] = dict(enumerate(tensors_of(given)))
        tensors |= {name: extra for name, extra in beside.items() if isinstance(extra, Tensor)}
        self._arrived.append({key: (tensor, tensor._version) for key, tensor in tensors.items()})

    def note_mutations(self, block: int) -> None:
        """Attribute to a block that has run the mutations of all inputs recorded so far."""
        for taker, tensors in enumerate(self._arrived):
            for key, (tensor, version) in tensors.items():
                if tensor._version != version:
                    self._changed.setdefault((taker, key), block)

    def changes(self, block: int) -> tuple[InputMutation, ...]:
        """Return the in-place mutations of a block's inputs."""
        tensors = {key: tensor for key, (tensor, _) in self._arrived[block].items()}
        return tuple(
            [
                InputMutation(key, self._changed[block, key], _neighbour(key, tensors))
                for key in tensors
                if (block, key) in self._changed
            ]
        )

    def strides(self, block: int) -> dict[ArgumentKey, tuple[int, ...]]:
        """Return the strides of a block's non-contiguous inputs."""
        return {key: one.stride() for key, (one, _) in self._arrived[block].items() if not one.is_contiguous()}

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Record the storages of weights and buffers."""
        self._held |= {weight.untyped_storage()._cdata: weight for weight in weights}

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of the tensors is a weight or a buffer, or a view of one."""
        return not self._held.keys().isdisjoint([tensor.untyped_storage()._cdata for tensor in tensors])


def _neighbour(key: ArgumentKey, tensors: Mapping[ArgumentKey, Tensor]) -> ArgumentKey | None:
    memory = tensors[key].untyped_storage()._cdata
    return next((k for k, t in tensors.items() if k != key and t.untyped_storage()._cdata == memory), None)
