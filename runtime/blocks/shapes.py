"""Shapes of what travels between stages: found on the meta device without data, by each rank for itself.

Which tensors that blocks are given change in place, found while shapes are: by the versions that torch counts.

    stage 0    block 0 ──x──┐
    stage 1                 └─▶ block 1: x.relu_()      x is the message here, and a leaf of a graph: it gets a copy

Within a stage a change in place is autograd's affair. At its border, or where blocks are run again, what is changed is
a copy; what shares its memory would have to change with it, and is refused (see `stage.in_place`).
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

from ..comm.device import draws_undone
from ..comm.modes import ModesLeftError
from ..objects.host_values import is_same
from ..objects.snapshot import Snapshot, UntriedError, label_in, require_no_iterator, require_undone
from ..objects.user_code import PLAIN
from .blame import place_of
from .blocks import TARGETS, Blocks, Change, Parcel, State, accepted_extras, needed_extras, on_meta, split_result, typed
from .dtensor import before_fully_shard
from .quick_shapes import QuickShapes
from .trees import DIFFERENTIABLE, Tensors, TensorSpec, TreeSpec, attribute_of, tensors_of
from .untouched import Result, as_leaves, attributes_untouched, run_block

_ONLY_TENSORS = "only tensors ride along: encode it as one, as the number of a task, for each sample"

HAND_ON = "pass it on in the forward, as an argument or output of layers, or return an auxiliary loss"
"""What to write for values that blocks of several stages, or the loss, hand on through objects."""


def trace_shapes(
    blocks: Blocks,
    inputs: TreeSpec,
    extras: Mapping[str, TreeSpec],
    dtype: torch.dtype | None = None,
    results: Sequence[tuple[Result, Sequence[State]]] = (),
    marks: Mapping[int, Sequence[tuple[str, str | int, Any]]] = MappingProxyType({}),
) -> list[Parcel]:
    """Return what every block leaves for the next, for one microbatch, found on the meta device: no data, no memory.

    `dtype` is that of the weights; None leaves them as they are built. `results`, where there are any, are what
    `run_block` gave of the blocks, on the meta device, and what they changed. `marks` are put where blocks have
    something on the host: by the number of a block, its owner and key there, see `State`, and what is put. Raises
    `MisfitError` that names the block that cannot take what the one before gives.
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
        watch.note(number)
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
            riders=tuple((n, TensorSpec.of(ride.tensor)) for n, ride in riders.items() if ride.since <= k < ride.until),
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
    """The tensors that blocks leave, with graphs: of their output, and those that ride along; all their parameters."""

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
    """Return what blocks leave on the meta device, where some of their parameters, in their order, are trained, or all.

    None where nobody can tell, since they cannot run without data. A block that leaves nothing that requires gradients,
    whatever it is given, as a layer that looks at numbers, is taken to do what layers do: graphs begin behind it.
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
    """Return what a block leaves on the meta device, and what rides along, with graphs; and its parameters."""
    bare, made = before_fully_shard(module), dict[int, Tensor]()
    weights = {n: made.setdefault(id(t), t.detach().to("meta", kind)) for n, t, kind in typed(bare, dtype)}
    own = [
        weights[name].requires_grad_(flag) for (name, _), flag in zip(module.named_parameters(), trained, strict=True)
    ]
    with draws_undone(), attributes_untouched(module), torch.enable_grad():
        left, fresh, _ = split_result(_run(bare, weights, given, taken))
    return left, fresh, own


def changed_by(before: Snapshot, block: str, again: Callable[[], object] | None = None) -> Iterator[State]:
    """Yield what a block has changed since, of its modules and of what their code names.

    `again` runs it once more: what it has made and keeps then is a table, and what it makes anew is none.

    Raises `UntriedError` for an iterator that it has made and keeps.
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
        counts = change.was is not None and isinstance(change.now, PLAIN)  # lists that grow are logs, for the most part
        yield State(
            change.owner if is_own else change.name,
            is_attribute=not is_own or change.owner.endswith(")"),
            is_named=counts and not is_own,
            owner=owner,
            key=key,
            said=change.owner if change.was is None and (isinstance(key, int) or key is change.now) else change.name,
            is_new=change.place in kept,
            counts=isinstance(change.now, int | str),
            holds=not isinstance(change.now, PLAIN),
        )


def _kept_again(
    before: Snapshot, made: Mapping[tuple[int, Any], Any], again: Callable[[], object]
) -> Set[tuple[int, Any]]:
    """Return where a block has what it made still after another run, in which nothing came beside it."""
    try:
        again()
    except Exception:
        return made.keys()
    later = {change.place: change.now for change in before.changes() if change.was is None}
    growing = {holder for holder, key in later.keys() - made.keys()}
    return {place for place, now in made.items() if place[0] not in growing and is_same(later.get(place), now)}


def _rebound(bare: nn.Module, before: Sequence[tuple[str, Tensor, int]], now: Mapping[str, Tensor]) -> Iterator[State]:
    """Yield the buffers that a block has changed, which were lent to it."""
    for name, tensor, version in before:
        path, _, key = name.rpartition(".")
        if now[name] is not tensor or tensor._version != version:
            yield State(label_in(bare, path), is_attribute=False)
            owner = label_in(bare, path)
            yield State(said := f"{owner}.{key}", is_attribute=False, owner=owner, key=key, said=said)


def _taken(number: int, module: nn.Module, extras: Mapping[str, Any], riders: Mapping[str, _Ride]) -> dict[str, Any]:
    """Return what of extras and riders a block takes; raises `MisfitError` where something is missing."""
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
    """Run a block on the meta device; where it makes tensors on the CPU that meet others, these are made there too."""
    try:
        with QuickShapes():
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
    """Say what a block was given when it raised an error, and where in it."""
    none = [f"{name}=None" for name, extra in taken.items() if extra is None]
    return (
        f"block {number} cannot take {TreeSpec.of(given)}: {error} (in {place_of(error, number, module)}"
        f"{''.join(f', {word}' for word in none)}; shapes are found by running the blocks on torch's meta device)"
    )


def _hint(error: Exception, earlier: Sequence[Sequence[State]]) -> str:
    """Return what to write where a block lacks what a block before it has set on the host."""
    name = error.name if isinstance(error, AttributeError) else error.args[0] if isinstance(error, KeyError) else None
    setters = [number for number, states in enumerate(earlier) if name and any(s.key == name for s in states)]
    return f"; block {setters[0]} sets {name!r}, which other stages do not have: {HAND_ON}" if setters else ""


def wants_data(error: MisfitError) -> bool:
    """Whether shapes could not be found since a block looks at data (`.item()`, masks), or is not made for meta."""
    cause = error.__cause__
    words = "" if cause is None else str(cause).lower()
    return isinstance(cause, NotImplementedError) or "meta" in words or "tensor.__format__" in words


def lengthened(left: TreeSpec, tokens: Sequence[int], times: int) -> TreeSpec:
    """Return what a block leaves of more tokens, where only data can tell: that of a unit of `tokens` has so many times
    the length in the first dimension of that length.
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
    """Return what tensors of an output, riders and extras are besides numbers, in words."""
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
    """Return the spec of what a block gave; raises `MisfitError` where it has no tensors, or such as cannot travel."""
    spec = TreeSpec.of(output)
    if not spec.tensors:
        raise MisfitError(
            f"block {number} ({type(block).__name__}) returns {spec.tree}, in which there is no tensor; it must return "
            "a tensor, or tuples, lists, dicts or dataclasses of tensors, or one of these beside an auxiliary loss"
        )
    for path, tensor in zip(spec.tree.paths, tensors_of(output), strict=True):
        _require_tensor(number, block, tensor, f"returns {{}}{f' at {path}' if path else ''}, which cannot travel")
    return spec


def _require_tensor(number: int, block: nn.Module, found: object, words: str) -> None:
    """Raise `MisfitError` unless something is a dense tensor of torch's own."""
    if isinstance(found, Tensor) and not isinstance(found, DTensor):
        if found.layout is torch.strided and not found.is_quantized and not found.is_nested:
            return
        kind = f"a tensor of layout {found.layout}"
    else:
        kind = f"a {type(found).__name__}"
    raise MisfitError(f"block {number} ({type(block).__name__}) {words.format(kind)}")


@dataclass
class _Ride:
    """A tensor that rides along from block `since` to block `until`."""

    tensor: Tensor
    since: int
    until: int


Key = int | str


class InPlace:
    """What is given to each block of a model that runs on the meta device."""

    def __init__(self) -> None:
        self._arrived: list[dict[Key, tuple[Tensor, int]]] = []
        self._changed: dict[tuple[int, Key], int] = {}
        self._held: dict[int, Tensor] = {}

    def arrive(self, given: object, beside: Mapping[str, object]) -> None:
        """Take note of what the next block is given, and of what goes by its side; of names that are tensors."""
        tensors: dict[Key, Tensor] = dict(enumerate(tensors_of(given)))
        tensors |= {name: extra for name, extra in beside.items() if isinstance(extra, Tensor)}
        self._arrived.append({key: (tensor, tensor._version) for key, tensor in tensors.items()})

    def note(self, block: int) -> None:
        """Take note of what has changed by a block that has run: of all that was ever given."""
        for taker, tensors in enumerate(self._arrived):
            for key, (tensor, version) in tensors.items():
                if tensor._version != version:
                    self._changed.setdefault((taker, key), block)

    def changes(self, block: int) -> tuple[Change, ...]:
        """Return the changes of what a block was given."""
        tensors = {key: tensor for key, (tensor, _) in self._arrived[block].items()}
        return tuple(
            [
                Change(key, self._changed[block, key], _neighbour(key, tensors))
                for key in tensors
                if (block, key) in self._changed
            ]
        )

    def strides(self, block: int) -> dict[Key, tuple[int, ...]]:
        """Return the strides of what a block was given that does not lie in memory in order."""
        return {key: one.stride() for key, (one, _) in self._arrived[block].items() if not one.is_contiguous()}

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Take note of weights and buffers."""
        self._held |= {weight.untyped_storage()._cdata: weight for weight in weights}

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of the tensors is a weight or a buffer, or looks into one."""
        return not self._held.keys().isdisjoint([tensor.untyped_storage()._cdata for tensor in tensors])


def _neighbour(key: Key, tensors: Mapping[Key, Tensor]) -> Key | None:
    memory = tensors[key].untyped_storage()._cdata
    return next((k for k, t in tensors.items() if k != key and t.untyped_storage()._cdata == memory), None)
