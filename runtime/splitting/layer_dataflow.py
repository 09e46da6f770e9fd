"""Data flow between the layers of a model, recorded by runs of its forward (walks) without weights.

A run of the forward is cut at its calls of layers. The code between two calls is a phase; a block consists of both:

    phase 0 │ call 0 │ phase 1 │ call 1 │ phase 2 │ … │ call n-1 │ phase n
    block 0 │ block 1│    block 2       │           …            │ block n+1

All blocks but the first are passed the hidden state that the call before returned. A layer's other arguments are
recomputed by running the forward up to the call with stand-ins for missing values, as long as they depend on
the model's inputs only (masks, positions). An experiment tests it: all values that depend on weights or hidden
states of other blocks are NaN. Values that turn out to come from an earlier block travel along from there (riders).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from quintsched.errors import MisfitError

from ..comm.torch_modes import Modes, modes_kept
from .weightless_model import ModelFrame, Walk

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""


class Placeholder(Enum):
    """Placeholder for the hidden state, where that is not yet known."""

    HIDDEN = "hidden"


HIDDEN = Placeholder.HIDDEN


@dataclass(frozen=True)
class Span:
    """Range of a model that makes a block: its calls, and the phases around them.

    Attributes:
        calls: the numbers of its calls of layers.
        is_first: whether it is passed the model's inputs; else the result of the call before.
        is_last: whether it goes on to the model's output.
        enters_call: whether it is passed the result of phase 0: it begins with call 0 itself.
    """

    calls: range
    is_first: bool = False
    is_last: bool = False
    enters_call: bool = False

    @property
    def phases(self) -> range:
        """Numbers of the phases that it runs."""
        first = self.calls.start + self.enters_call
        return range(first, self.calls.stop + (self.is_last or not self.calls))


@dataclass(frozen=True)
class Rider:
    """A value, besides the hidden state, that a block computes and later ones use.

    Attributes:
        name: its name among the extras that blocks pass on.
        source: the number of the block that computes it.
        found: the call, and the place among its arguments, where that block finds it.
        takers: the same of all calls that use it.
    """

    name: str
    source: int
    found: tuple[int, str]
    takers: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class CallResult:
    """Structure of a call's result: `leaves` are `HIDDEN`, the place of an argument that is returned, or None."""

    spec: TreeSpec
    leaves: tuple[str | Placeholder | None, ...]
    constants: tuple[Any, ...]

    @property
    def sample(self) -> Tensor:
        """Hidden state as the call returned it when it was recorded, on the meta device."""
        found = self.constants[self.leaves.index(HIDDEN)]
        assert isinstance(found, Tensor)
        return found

    def rebuilt(self, hidden: Tensor, call: CallArguments) -> Any:
        """Return a result from a hidden state and the call's arguments, with NaN in place of other tensors."""
        given = by_place(call)
        leaves = [
            hidden if leaf is HIDDEN else given[leaf] if isinstance(leaf, str) else self._hole(constant, hidden)
            for leaf, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)

    def _hole(self, constant: Any, hidden: Tensor) -> Any:
        """Return a stand-in for a tensor that is not available; its sizes follow those of the hidden state."""
        if not isinstance(constant, Tensor):
            return constant
        now = {(dim, was): size for dim, (was, size) in enumerate(zip(self.sample.shape, hidden.shape, strict=False))}
        changed = {was: size for (_, was), size in reversed(now.items()) if was != size}
        shape = [now.get((dim, was), changed.get(was, was)) for dim, was in enumerate(constant.shape)]
        return torch.full(shape, torch.nan if is_number(constant) else 0, dtype=constant.dtype, device=hidden.device)


@dataclass
class Flow:
    """Record of a model's forward.

    Attributes:
        calls: names of the layers, one for each call.
        results: structure of each call's result.
        beside: names of the modules that each phase calls.
        weights: names of the weights that each phase uses without calling their modules.
        buffers: the same of the buffers that are saved.
        entries: place of the hidden state among each call's arguments; empty where there is none.
        keeps: for each call, whether its result has the shape of its hidden state.
        arguments: for each call, its arguments, where they are a hidden state and no other tensor.
        repeats: for each call, whether its arguments depend on no hidden state except the one passed.
        riders: values that travel besides the hidden state and the model's inputs.
        modes: for each call, the modes of torch (no_grad, autocast) around it, apart from those around the model.
    """

    calls: list[str] = field(default_factory=list)
    results: list[CallResult] = field(default_factory=list)
    beside: list[list[str]] = field(default_factory=lambda: [[]])
    weights: list[list[str]] = field(default_factory=lambda: [[]])
    buffers: list[list[str]] = field(default_factory=lambda: [[]])
    entries: list[str] = field(default_factory=list)
    keeps: list[bool] = field(default_factory=list)
    arguments: list[CallArguments | None] = field(default_factory=list)
    repeats: list[bool] = field(default_factory=list)
    riders: list[Rider] = field(default_factory=list)
    modes: list[Modes | None] = field(default_factory=list)

    def is_like(self, other: Flow) -> bool:
        """Whether another record has the same calls in the same way; samples and settings may differ."""
        forms = [[(r.spec, r.leaves, r.sample.shape, r.sample.dtype) for r in flow.results] for flow in (self, other)]
        names = ("calls", "beside", "weights", "buffers", "entries", "keeps", "repeats", "riders", "modes")
        return forms[0] == forms[1] and all(getattr(self, name) == getattr(other, name) for name in names)


def by_place(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths in it."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def replaced(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with other leaves at some paths."""
    flat, spec = tree_flatten_with_path(tree)
    return tree_unflatten([leaves.get(keystr(path), leaf) for path, leaf in flat], spec)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a tensor that may depend on weights."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def is_unknown(leaf: Any) -> bool:
    """Whether a leaf depends on unknown values."""
    return is_number(leaf) and bool(leaf.isnan().any())


class Stop(Exception):
    """Ends a walk."""


class SpanWalk(Walk):
    """Runs a block's part of the forward.

    Args:
        frame: the weightless copy of the model.
        device: device of its tensors.
        flow: the record of the model.
        number: of the block.
        spans: all blocks.
        hidden: the hidden state that the block is passed; None for the first.
        taken: riders that it is passed, by name.

    Attributes:
        left: the hidden state that it returns.
        made: riders that it computes, by name.
        is_done: whether the rest of the forward can be skipped.
    """

    def __init__(
        self,
        frame: ModelFrame,
        device: torch.device,
        flow: Flow,
        number: int,
        spans: Sequence[Span],
        hidden: Tensor | None,
        taken: Mapping[str, Tensor],
    ) -> None:
        super().__init__(frame, device)
        self.flow, self.span = flow, spans[number]
        self.hidden, self.left = hidden, hidden
        self.made: dict[str, Tensor] = {}
        self.is_done, self._around = False, Modes.now()
        self._taken = [(place, taken[r.name]) for r in flow.riders for place in r.takers if r.name in taken]
        self._wanted = [rider for rider in flow.riders if rider.source == number]

    def go(self, arguments: Mapping[str, Any]) -> Any:
        """Run; return the model's output, or None where the block ends before it."""
        self._tell_training()
        with modes_kept() as self._around:  # the walk may end before the code that switches them back
            try:
                return self.run_forward(arguments)
            except Stop:
                return None

    def called(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of one of the block's own calls."""
        raise NotImplementedError

    def passed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the riders that a call after the block is passed."""
        given = by_place((args, kwargs))
        for rider in [rider for rider in self._wanted if rider.found[0] == number]:
            self.made[rider.name] = given[rider.found[1]]
            self._wanted.remove(rider)
        self.is_done = not self._wanted or number == len(self.flow.calls) - 1

    def skipped(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a hidden state of the shape that a call outside of the block returns; its numbers are arbitrary."""
        if self.flow.keeps[number]:
            hidden = by_place((args, kwargs))[self.flow.entries[number]]
            assert isinstance(hidden, Tensor)
            return hidden
        self.inside = True
        try:
            return self.fill(hidden_of(self.flow.results[number], self.on_meta(layer, args, kwargs)))
        finally:
            self.inside = False

    def is_training(self) -> bool:
        """Whether the block's own code between layers runs in training mode."""
        return False

    def _tell_training(self) -> None:
        self.frame.set_training(self.is_training() and self.calls in self.span.phases, as_model=True)

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call: its own within the block, outside of it a stand-in."""
        span, result = self.span, self._known(layer, number)
        self._tell_training()
        if number < span.calls.start:
            is_given = number == span.calls.start - 1
            hidden = self.hidden if is_given else self.skipped(layer, number, args, kwargs)
            assert hidden is not None
            if is_given and self.is_training():  # others' code ran in eval mode: put modes as after it
                for modes in (self._around, self.flow.modes[number] or self._around):
                    modes.put_back()
            return result.rebuilt(hidden, (args, kwargs))
        if number == 0 and span.enters_call:
            args, kwargs = replaced((args, kwargs), {self.flow.entries[0]: self.hidden})
        mine = {place: tensor for (call, place), tensor in self._taken if call == number}
        if mine:
            args, kwargs = replaced((args, kwargs), mine)
        if number in span.calls:
            made = self.called(layer, number, args, kwargs)
            self.left = hidden_of(result, made)
            self.is_done = number == span.calls[-1] and not self._wanted
        else:
            if not span.calls and number == 0:
                self.left = by_place((args, kwargs))[self.flow.entries[0]]
            self.passed(number, args, kwargs)
            made = None if self.is_done else result.rebuilt(self.skipped(layer, number, args, kwargs), (args, kwargs))
        if self.is_done and not span.is_last:
            raise Stop
        return made

    def _known(self, layer: nn.Module, number: int) -> CallResult:
        name, calls = self.frame.name_of(layer), self.flow.calls
        if number >= len(calls) or name != calls[number]:
            raise MisfitError(
                f"call {number} of a layer is of {name!r}, and was of {(*calls, 'none')[min(number, len(calls))]!r} "
                "when the model was split: layers that are left out, or change their order, cannot be blocks"
            )
        return self.flow.results[number]


def hidden_of(result: CallResult, made: Any) -> Tensor:
    """Return the hidden state in a call's result."""
    leaves = tree_flatten(made)[0]
    hidden = leaves[result.leaves.index(HIDDEN)]
    assert isinstance(hidden, Tensor)
    return hidden
