"""What the blocks of a model that was split have in common: its forward, and what that calls its layers with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .flow import HIDDEN, Call, Flow, Span, SpanWalk, Stop, replaced
from .frame import Frame


class Origin:
    """What the blocks of a model have in common.

    Args:
        frame: the model's forward.
        flow: what is known of it.
        spans: which part each block is.
        inputs: the names of the inputs that its forward takes, the first one first.
        settings: what else its forward is called with.
        select: what of the model's output the last block returns.

    Attributes:
        uncarried: inputs that no later block needs, with shapes of one sample that stand for them.
    """

    def __init__(
        self,
        frame: Frame,
        flow: Flow,
        spans: Sequence[Span],
        inputs: Sequence[str],
        settings: Mapping[str, Any],
        select: Callable[[Any], Any],
    ) -> None:
        self.frame, self.flow, self.spans = frame, flow, tuple(spans)
        self.inputs, self.settings, self.select = tuple(inputs), dict(settings), select
        self.uncarried: dict[str, Tensor] = {}
        self._last: tuple[Mapping[str, Any], torch.dtype, dict[int, Call]] = ({}, torch.float32, {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def takes(self, number: int) -> tuple[str, ...]:
        """Return by which names block `number` takes more than what the block before leaves."""
        calls = self.spans[number].calls
        riders = (r.name for r in self.flow.riders if any(call in calls for call, _ in r.takers))
        return (*self.inputs, *riders)

    def inputs_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what of that which a block is given by name are inputs of the model."""
        return {name: value for name, value in given.items() if name in self.inputs and value is not None}

    def arguments(self, number: int, hidden: Tensor, given: Mapping[str, Any]) -> Call:
        """Return what the layer is called with that is all of block `number`."""
        call, inputs = self.spans[number].calls.start, self.inputs_of(given)
        plain = self.flow.arguments[call]
        if plain is not None and inputs.keys() <= {self.inputs[0]}:
            return _with_hidden(plain, hidden)
        riders = {place: given[r.name] for r in self.flow.riders for at, place in r.takers if at == call}
        if hidden.is_meta or not self.flow.repeats[call]:
            found = self._walk(number, hidden, inputs, on=False)[call]
        else:
            found = self._remembered(number, hidden, inputs)[call]
        args, kwargs = replaced(_with_hidden(found, hidden), riders)
        return args, kwargs

    def _remembered(self, number: int, hidden: Tensor, inputs: dict[str, Any]) -> dict[int, Call]:
        """Return what this call and later ones get: if possible from the last walk, where it had the same inputs."""
        old, dtype, calls = self._last
        is_same = old.keys() == inputs.keys() and all(old[name] is value for name, value in inputs.items())
        if not is_same or dtype != hidden.dtype or self.spans[number].calls.start not in calls:
            with torch.no_grad():
                calls = self._walk(number, hidden, inputs, on=True)
            self._last = (inputs, hidden.dtype, calls)
        return calls

    def _walk(self, number: int, hidden: Tensor, inputs: Mapping[str, Any], *, on: bool) -> dict[int, Call]:
        self.frame.cast(hidden.dtype)
        walk = _ArgumentsWalk(self, number, computable(hidden), on)
        walk.go(self.called_with(inputs, hidden))
        found = {at: tree_map(lambda leaf: HIDDEN if leaf is walk.hidden else leaf, c) for at, c in walk.found.items()}
        return as_meta(found) if hidden.is_meta else found

    def called_with(self, inputs: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """Return what the forward is called with for a batch of as many samples as `like` has."""
        stand_ins = {
            name: sample.new_full((like.shape[0], *sample.shape[1:]), torch.nan, device=computable(like).device)
            for name, sample in self.uncarried.items()
            if name not in inputs
        }
        return {**self.settings, **tree_map(computable, dict(inputs)), **stand_ins}


class _ArgumentsWalk(SpanWalk):
    """Finds what a layer is called with; if it goes `on`, what later ones are, too, with the same hidden state."""

    def __init__(self, origin: Origin, number: int, hidden: Tensor, on: bool) -> None:
        super().__init__(origin.frame, hidden.device, origin.flow, number, origin.spans, hidden, {})
        self._on = on
        self.found: dict[int, Call] = {}

    def called(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.found[number] = (args, kwargs)
        if not self._on:
            raise Stop
        assert self.left is not None
        return self.flow.results[number].rebuilt(self.left, (args, kwargs))

    def passed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.found[number] = (args, kwargs)
        self.is_done = number == len(self.flow.calls) - 1


def _with_hidden(call: Call, hidden: Tensor) -> Call:
    args, kwargs = tree_map(lambda leaf: hidden if leaf is HIDDEN else leaf, call)
    return args, kwargs


def computable(leaf: Any) -> Any:
    """Return a leaf that can be computed with: ones for a tensor of the meta device, where only shapes matter."""
    is_meta = isinstance(leaf, Tensor) and leaf.is_meta
    return torch.ones(leaf.shape, dtype=leaf.dtype) if is_meta else leaf


def as_meta(tree: Any) -> Any:
    """Return a tree with its tensors on the meta device."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)
