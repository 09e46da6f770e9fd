"""Search for values that must travel between blocks besides hidden states, by experiments with NaN.

In the experiment of a block its own weights and its hidden state are finite numbers, and those of all other blocks NaN:

    argument of call k    in the experiment of its own block    in that of an earlier block
    attention mask        finite: recomputed there              -
    relative positions    NaN                                   finite: travels along from there (a rider)
    mixture of both       NaN                                   NaN: refused
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from quintsched.errors import MisfitError, QuintschedError

from ..blocks.without_side_effects import attributes_untouched, run_alone, untouched
from ..comm.torch_modes import Modes, modes_kept
from ..user_objects.branches_on_draws import DrawnValues, memory_of
from ..user_objects.find_impure_code import asking_elsewhere
from ..user_objects.library_or_user import arguments_of, is_of_framework, is_of_library
from . import layer_dataflow as dataflow
from .layer_dataflow import HIDDEN, CallArguments, CallResult, Flow, Placeholder, Rider, Span, SpanWalk
from .materialize_blocks import materialised
from .state_between_layers import BetweenLayers, HostChanges
from .weightless_model import ModelFrame, Walk

ArgumentPlace = tuple[int, str]
"""Number of a call, and a place among its arguments."""


def capture(frame: ModelFrame, model: nn.Module, inputs: Mapping[str, Any], watch: BetweenLayers | None = None) -> Flow:
    """Record one run of a model's forward, its calls of layers; raises `MisfitError` where none is called.

    `watch` records what the code between layers does.
    """
    walk = _Capture(frame, model, torch.device("cpu"), watch)
    frame.set_training(
        watch is None or watch.trains
    )  # dropout in the code between layers makes another tensor of a hidden state
    try:
        with torch.enable_grad(), modes_kept() as walk.around, nullcontext() if watch is None else watch.drawn:
            with asking_elsewhere() if watch else nullcontext(list[str]()) as asked:
                walk.run_forward(inputs)
            walk.around.require_kept(f"the forward of {type(frame.root).__name__}")
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise MisfitError(
            f"the forward of {type(frame.root).__name__} differentiates through its layers ({error}), which lie on "
            "several ranks; let one block have the gradient and all that it is of: split(model, blocks=[…])"
        ) from error
    frame.set_training(False)
    if watch is not None:
        watch.written = watch.written or walk.written()
        watch.asked += asked
    if not walk.flow.calls:
        raise MisfitError(f"the forward of {type(frame.root).__name__} calls none of {', '.join(frame.layers[:4])}")
    return walk.flow


class _Capture(Walk):
    """Records calls; all weights and hidden states are unknown (NaN)."""

    def __init__(self, frame: ModelFrame, model: nn.Module, device: torch.device, watch: BetweenLayers | None) -> None:
        super().__init__(frame, device)
        self._model, self._watch = model, watch
        self._stand_ins: list[tuple[str, Tensor]] = []
        """Flat views of stand-ins for weights, by name: a write to their memory is a write to that weight."""
        self.around = Modes.now()
        self.flow = Flow()
        self._hidden: Tensor | None = None
        self._version: int | None = None

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flow, given = self.flow, dataflow.by_place((args, kwargs))
        left, version = self._hidden, self._version
        is_unchanged = left is not None and (version is None or left._version == version)
        is_same = is_unchanged and any(leaf is left for leaf in given.values())
        hidden = left if is_same else next(filter(dataflow.is_number, given.values()), None)
        marks = {place: HIDDEN if leaf is hidden else leaf for place, leaf in given.items()}
        places = [place for place, leaf in marks.items() if leaf is HIDDEN]
        is_next = is_same or not number
        is_plain = bool(places) and all(isinstance(leaf, Placeholder | bool | str | None) for leaf in marks.values())
        modes = Modes.now().apart_from(self.around)
        with nullcontext() if self._watch is None else self._watch.within(layer, counts=False):
            made = self._made(layer, (args, kwargs), given)
        flow.modes.append(modes)
        flow.calls.append(self.frame.name_of(layer))
        flow.entries.append(places[0] if places else "")
        flow.arguments.append(dataflow.replaced((args, kwargs), marks) if is_plain and is_next else None)
        flow.repeats.append(len(places) == 1 and is_next)
        flow.keeps.append(hidden is not None and made.sample.shape == hidden.shape)
        flow.results.append(made)
        flow.beside.append([])
        flow.weights.append([])
        flow.buffers.append([])
        self._hidden = self.fill(made.sample)
        self._version = None if self._hidden.is_inference() else self._hidden._version
        return made.rebuilt(self._hidden, (args, kwargs))

    def _made(self, layer: nn.Module, call: CallArguments, given: dict[str, Any]) -> CallResult:
        """Run a layer for the form of its result: on the meta device, or with real numbers if it reads values."""
        name = self.frame.name_of(layer)
        self.inside = True
        try:
            made, tensors = self._run_layer(name, layer, call, "meta")
        except Exception:
            own = self._model.get_submodule(name)
            if any(p.is_meta for p in own.parameters()):
                own = materialised(self._model, partial(self._model.get_submodule, name))
            with untouched(own):
                made, tensors = self._run_layer(name, own, call, "cpu")
        finally:
            self.inside = False
        places = {id(tensor): place for tensor, place in zip(tensors, given, strict=True) if isinstance(tensor, Tensor)}
        leaves, form = tree_flatten(made)
        first = next((leaf for leaf in leaves if dataflow.is_number(leaf)), None)
        if first is None:
            raise MisfitError(f"{name!r} gives no tensor of floating point")
        return CallResult(
            form,
            tuple(HIDDEN if leaf is first else places.get(id(leaf)) for leaf in leaves),
            tuple(leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        )

    def _run_layer(self, name: str, layer: nn.Module, call: CallArguments, device: str) -> tuple[Any, list[Any]]:
        """Return a layer's result and its arguments: tensors on a device, with NaN replaced."""
        leaves, spec = tree_flatten(call)
        given = [leaf.to(device).nan_to_num(0.1) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(given, spec)
        return run_alone(lambda call: layer(*call[0], **call[1]), (args, kwargs), repr(name))[0], given

    def beside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.flow.beside[self.calls]
        name = self.frame.name_of(module)
        if name not in called:
            called.append(name)
        if self._watch is None:
            return super().beside(module, args, kwargs)
        with self._watch.within(module):
            made = super().beside(module, args, kwargs)
        self._watch.drawn.returned(made)
        return made

    def weight(self, owner: nn.Module, name: str, parameter: Tensor) -> Tensor:
        self._note(self.flow.weights, owner, name)
        stand_in = super().weight(owner, name, parameter)
        self._stand_ins.append((f"{self.frame.name_of(owner)}.{name}".removeprefix("."), stand_in.view(-1)))
        return stand_in

    def written(self) -> str:
        """Return the name of a weight that code between layers has written to; "" where there is none."""
        written = set() if self._watch is None else self._watch.drawn.written
        return next((name for name, tensor in self._stand_ins if memory_of(tensor) in written), "")

    def note_read(self, owner: nn.Module, name: str) -> None:
        if name not in owner._non_persistent_buffers_set:
            self._note(self.flow.buffers, owner, name)

    def _note(self, used: list[list[str]], owner: nn.Module, name: str) -> None:
        full = f"{self.frame.name_of(owner)}.{name}".removeprefix(".")
        if full not in used[self.calls]:
            used[self.calls].append(full)


@dataclass
class CarriedValues:
    """Findings on a model's forward: its calls, its blocks, and inputs that later blocks do not need."""

    flow: Flow
    spans: list[Span]
    unneeded: dict[str, Tensor]


def explore(
    frame: ModelFrame, model: nn.Module, inputs: Mapping[str, Any], select: Callable[[Any], Any], *, is_own: bool
) -> CarriedValues:
    """Record a forward; with `is_own`, for user code, check that every run does the same.

    Raises `MisfitError`.
    """
    try:
        return _explored(frame, model, inputs, select, is_own=is_own)
    except QuintschedError:
        raise
    except Exception as error:
        ours, places = f"{Path(__file__).parents[1]}/", traceback.extract_tb(error.__traceback__)
        at = next((place for place in reversed(places) if not place.filename.startswith(ours)), places[-1])
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise MisfitError(
            f"the forward of {type(model).__name__} does not run where numbers between its layers are unknown "
            f"({said}, {at.filename}:{at.lineno}); let a layer or the loss look at them"
        ) from error


def _explored(
    frame: ModelFrame, model: nn.Module, inputs: Mapping[str, Any], select: Callable[[Any], Any], *, is_own: bool
) -> CarriedValues:
    if not is_own:
        return _found(frame, capture(frame, model, inputs), inputs, select)
    flows: list[Flow] = []
    with attributes_untouched(model):
        followed = map(frame.root.get_submodule, frame.followed)
        apart = [m for m in followed if is_of_library(type(m)) and not is_of_framework(type(m))]
        for trains in (True, False):
            watch = BetweenLayers(DrawnValues(), HostChanges(frame.root, apart), trains)

            def run(given: Mapping[str, Any] = inputs, watch: BetweenLayers = watch) -> None:
                with nullcontext() if watch.trains else suppress(Exception):  # it may not be made for evaluations
                    flows.append(capture(frame, model, given, watch))

            watch.require_steady(type(model).__name__, run, partial(_run_for_others, run, inputs))
        return _found(frame, flows[0], inputs, select)


def _found(frame: ModelFrame, flow: Flow, inputs: Mapping[str, Any], select: Callable[[Any], Any]) -> CarriedValues:
    spans = spans_of(flow)
    flow.riders = find_riders(frame, flow, spans, inputs, select)
    return CarriedValues(flow, spans, find_unneeded(frame, flow, spans, inputs, select))


def _run_for_others(run: Callable[[Mapping[str, Any]], None], inputs: Mapping[str, Any]) -> None:
    """Run for other numbers of the same shapes; for the same, where it takes no others."""
    others = {n: t.flip([*range(t.dim())]) if isinstance(t, Tensor) else t for n, t in inputs.items()}
    try:
        run(others)
    except Exception:
        run(inputs)


def spans_of(flow: Flow) -> list[Span]:
    """Return the blocks: the first and the last phase are blocks of their own where they have weights."""
    count = len(flow.calls)
    before, behind = (bool(flow.beside[phase] or flow.weights[phase]) for phase in (0, count))
    before = before and bool(flow.entries[0])
    spans = [Span(range(0, 0), is_first=True)] if before else []
    for call in range(count):
        is_first, is_last = call == 0 and not before, call == count - 1 and not behind
        spans.append(Span(range(call, call + 1), is_first, is_last, enters_call=call == 0 and before))
    return [*spans, Span(range(count, count), is_last=True)] if behind else spans


def find_riders(
    frame: ModelFrame,
    flow: Flow,
    spans: Sequence[Span],
    inputs: Mapping[str, Any],
    select: Callable[[Any], Any],
) -> list[Rider]:
    """Return the values that travel besides hidden states and inputs.

    `select` takes the relevant part of the model's output.

    Raises `MisfitError` for values that a block can neither recompute nor be passed.
    """
    seen = [_Experiment(frame, flow, number, spans, inputs) for number in range(len(spans))]
    riders: dict[int, Rider] = {}
    for number, span in enumerate(spans):
        for place in [place for place in seen[number].unknown if place[0] in span.calls]:
            source = next((s for s in range(number) if place in seen[s].known), None)
            if source is None:
                call, where = place
                raise MisfitError(
                    f"{flow.calls[call]!r} is called with something ({where}) that depends on weights of several "
                    "earlier blocks; name blocks that keep them together"
                )
            value = id(seen[source].known[place])
            old = riders.get(value)
            name = f"rider{len(riders)}" if old is None else old.name
            found = place if old is None else old.found
            riders[value] = Rider(name, source, found, (*(old.takers if old else ()), place))
    last = _Experiment(frame, flow, len(spans) - 1, spans, inputs, [*riders.values()])
    if any(dataflow.is_unknown(leaf) for leaf in tree_flatten(select(last.output))[0]):
        raise MisfitError(
            f"what follows the last layer, {flow.calls[-1]!r}, uses more than what that gives: a value that an "
            "earlier block has made; name blocks that keep them together"
        )
    return [*riders.values()]


def find_unneeded(
    frame: ModelFrame, flow: Flow, spans: Sequence[Span], inputs: Mapping[str, Any], select: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Return the inputs of floating point (images, sounds) of which no block but the first needs any number or size.

    They are tried with NaN in their place, and with twice their sizes, where the model takes such. One with a default,
    except the first, is needed: later blocks see by it whether it was passed.
    """
    unneeded: dict[str, Tensor] = {}
    if None in flow.arguments[1:]:
        return unneeded
    parameters = [*arguments_of(frame.root.forward).values()]
    optional = {p.name for p in parameters[1:] if p.default is not p.empty}
    for name, tensor in inputs.items():
        if name in optional or not dataflow.is_number(tensor):
            continue
        shapes: list[list[torch.Size]] = []
        for factor in (1, 2):
            shape = (tensor.shape[0], *(size * factor if size > 3 else size for size in tensor.shape[1:]))
            blank = {**inputs, name: tensor.new_full(shape, torch.nan)}
            try:
                output = tree_flatten(
                    select(_Experiment(frame, flow, len(spans) - 1, spans, blank, flow.riders).output)
                )[0]
            except Exception:
                break
            if any(map(dataflow.is_unknown, output)):
                shapes = []
                break
            shapes.append([leaf.shape for leaf in output if isinstance(leaf, Tensor)])
        if shapes and all(shape == shapes[0] for shape in shapes):
            unneeded[name] = tensor.detach().to("meta")
    return unneeded


class _Experiment(SpanWalk):
    """Walk in which one block has finite numbers, and all others NaN.

    Attributes:
        known: arguments of later calls that are finite all the same.
        unknown: places of arguments that are not.
    """

    def __init__(
        self,
        frame: ModelFrame,
        flow: Flow,
        number: int,
        spans: Sequence[Span],
        inputs: Mapping[str, Any],
        riders: Sequence[Rider] = (),
    ) -> None:
        span = spans[number]
        start = None if span.is_first else _finite(flow.results[max(span.phases.start - 1, 0)].sample)
        super().__init__(frame, torch.device("cpu"), flow, number, spans, start, {})
        self.known: dict[ArgumentPlace, Tensor] = {}
        self.unknown: list[ArgumentPlace] = []
        self._alive: list[Any] = []
        self._has_unknown = False
        self._ridden = {place for rider in riders for place in rider.takers}
        with modes_kept():
            self.output = self.run_forward(inputs)

    def fill(self, like: Tensor) -> Tensor:
        filled = super().fill(like)
        is_own = self.calls in self.span.phases and not self._has_unknown
        return _finite(filled) if is_own and dataflow.is_number(filled) else filled

    def beside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call as other walks do; results computed from unknown arguments stay unknown."""
        self._has_unknown = any(map(dataflow.is_unknown, tree_flatten((args, kwargs))[0]))
        try:
            return super().beside(module, args, kwargs)
        finally:
            self._has_unknown = False

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the arguments of a call; results of the block's own calls are finite, all others unknown."""
        result, span = self._known(layer, number), self.span
        if number == 0 and span.enters_call:
            args, kwargs = dataflow.replaced((args, kwargs), {self.flow.entries[0]: self.hidden})
        given = dataflow.by_place((args, kwargs))
        for place, leaf in given.items():
            if dataflow.is_number(leaf):
                self._note((number, place), leaf)
        self._alive.append(given)
        if number == span.calls.start - 1:
            assert self.hidden is not None
            return result.rebuilt(self.hidden, (args, kwargs))
        if number not in span.calls:
            return result.rebuilt(Walk.fill(self, result.sample), (args, kwargs))
        leaves = [
            given[leaf] if isinstance(leaf, str) else _finite(constant) if dataflow.is_number(constant) else constant
            for leaf, constant in zip(result.leaves, result.constants, strict=True)
        ]
        return tree_unflatten(leaves, result.spec)

    def _note(self, place: ArgumentPlace, leaf: Tensor) -> None:
        if place in self._ridden:
            return
        if dataflow.is_unknown(leaf):
            self.unknown.append(place)
        elif place[0] >= self.span.calls.stop:
            self.known[place] = leaf


def _finite(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return (torch.rand(like.shape, generator=generator, dtype=torch.float64) + 0.1).to(like.dtype)
