"""Which values have to travel between blocks besides hidden states: found by leaving out what a block does not have.

In the experiment of a block its own weights and its hidden state are finite numbers, and those of all other blocks NaN:

    argument of call k    in the experiment of its own block    in that of an earlier block
    attention mask        finite: it is found again             -
    relative positions    NaN                                   finite: it rides along from there
    what mixes both       NaN                                   NaN: refused
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from quintsched.errors import MisfitError

from .flow import Flow, Rider, Span, SpanWalk, by_place, is_number, is_unknown, replaced
from .frame import Frame, Walk

Place = tuple[int, str]
"""A call, and a place among its arguments."""


def find_riders(
    frame: Frame,
    flow: Flow,
    spans: Sequence[Span],
    inputs: Mapping[str, Any],
    select: Callable[[Any], Any],
) -> list[Rider]:
    """Return what travels besides hidden states and inputs.

    `select` takes what counts of the model's output.

    Raises `MisfitError` for what a block can neither find again nor be given.
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
    if any(is_unknown(leaf) for leaf in tree_flatten(select(last.output))[0]):
        raise MisfitError(
            f"what follows the last layer, {flow.calls[-1]!r}, uses more than what that gives: a value that an "
            "earlier block has made; name blocks that keep them together"
        )
    return [*riders.values()]


def find_unneeded(
    frame: Frame, flow: Flow, spans: Sequence[Span], inputs: Mapping[str, Any], select: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """Return the inputs of floating point (images, sounds) of which no block but the first needs any number or size.

    They are tried with NaN in their place, and with twice their sizes, where the model takes such.
    """
    unneeded: dict[str, Tensor] = {}
    if None in flow.arguments[1:]:
        return unneeded
    for name, tensor in inputs.items():
        if not is_number(tensor):
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
            if any(map(is_unknown, output)):
                shapes = []
                break
            shapes.append([leaf.shape for leaf in output if isinstance(leaf, Tensor)])
        if shapes and all(shape == shapes[0] for shape in shapes):
            unneeded[name] = tensor.detach().to("meta")
    return unneeded


class _Experiment(SpanWalk):
    """Runs the forward with the finite numbers of one block.

    Attributes:
        known: arguments of later calls that are finite all the same.
        unknown: the places of arguments that are not.
    """

    def __init__(
        self,
        frame: Frame,
        flow: Flow,
        number: int,
        spans: Sequence[Span],
        inputs: Mapping[str, Any],
        riders: Sequence[Rider] = (),
    ) -> None:
        span = spans[number]
        start = None if span.is_first else _finite(flow.results[max(span.phases.start - 1, 0)].sample)
        super().__init__(frame, torch.device("cpu"), flow, number, spans, start, {})
        self.known: dict[Place, Tensor] = {}
        self.unknown: list[Place] = []
        self._alive: list[Any] = []
        self._has_unknown = False
        self._ridden = {place for rider in riders for place in rider.takers}
        self.output = self.run(inputs)

    def fill(self, like: Tensor) -> Tensor:
        filled = super().fill(like)
        is_own = self.calls in self.span.phases and not self._has_unknown
        return _finite(filled) if is_own and is_number(filled) else filled

    def beside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As for other walks; what is made of something unknown is not known."""
        self._has_unknown = any(map(is_unknown, tree_flatten((args, kwargs))[0]))
        try:
            return super().beside(module, args, kwargs)
        finally:
            self._has_unknown = False

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what a call is given; its own results are finite, all others unknown."""
        result, span = self.flow.results[number], self.span
        if number == 0 and span.enters_call:
            args, kwargs = replaced((args, kwargs), {self.flow.entries[0]: self.hidden})
        given = by_place((args, kwargs))
        for place, leaf in given.items():
            if is_number(leaf):
                self._note((number, place), leaf)
        self._alive.append(given)
        if number == span.calls.start - 1:
            assert self.hidden is not None
            return result.rebuilt(self.hidden, (args, kwargs))
        if number not in span.calls:
            return result.rebuilt(Walk.fill(self, result.sample), (args, kwargs))
        leaves = [
            given[leaf] if isinstance(leaf, str) else _finite(constant) if is_number(constant) else constant
            for leaf, constant in zip(result.leaves, result.constants, strict=True)
        ]
        return tree_unflatten(leaves, result.spec)

    def _note(self, place: Place, leaf: Tensor) -> None:
        if place in self._ridden:
            return
        if is_unknown(leaf):
            self.unknown.append(place)
        elif place[0] >= self.span.calls.stop:
            self.known[place] = leaf


def _finite(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    numbers = torch.rand(like.shape, generator=generator, dtype=torch.float64) + 0.1
    return numbers.to(like.dtype)
