"""What passes between the layers of a model, found by walking its forward: no weights, no families written out.

A run of the forward is cut by its calls of layers. What lies between two calls is a phase; a block is some of both:

    phase 0 │ call 0 │ phase 1 │ call 1 │ phase 2 │ … │ call n-1 │ phase n
    block 0 │ block 1│    block 2       │           …            │ block n+1

All blocks but the first are given the hidden state that the call before has left. The rest of what a layer is called
with is found again by running the forward up to the call with stand-ins for what is not here, as long as it depends on
the model's inputs only (masks, positions). Whether it does is an experiment: all that depends on weights or on hidden
states of elsewhere is NaN. What an experiment shows to come from an earlier block rides along from there.
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

from ..comm.modes import Modes, modes_kept
from .weightless_model import Frame, Walk

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by place and by name."""


class Mark(Enum):
    """What stands for the hidden state where that itself is not yet there."""

    HIDDEN = "hidden"


HIDDEN = Mark.HIDDEN


@dataclass(frozen=True)
class Span:
    """The part of a model that a block is: its calls, and which phases.

    Attributes:
        calls: the numbers of its calls of layers.
        is_first: whether it is given the model's inputs; else what the call before has left.
        is_last: whether it goes on to the model's output.
        enters_call: whether it is given what phase 0 leaves: it begins with call 0 itself.
    """

    calls: range
    is_first: bool = False
    is_last: bool = False
    enters_call: bool = False

    @property
    def phases(self) -> range:
        """The numbers of the phases that it runs."""
        first = self.calls.start + self.enters_call
        return range(first, self.calls.stop + (self.is_last or not self.calls))


@dataclass(frozen=True)
class Rider:
    """A value that a block makes and later ones take.

    Attributes:
        name: by which it travels.
        source: the number of the block.
        found: the call, and the place among its arguments, where the block finds it.
        takers: the same of all calls that take it.
    """

    name: str
    source: int
    found: tuple[int, str]
    takers: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Result:
    """What a call gives: `leaves` are `HIDDEN`, a place among the arguments that is handed through, or None."""

    spec: TreeSpec
    leaves: tuple[str | Mark | None, ...]
    constants: tuple[Any, ...]

    @property
    def sample(self) -> Tensor:
        """A hidden state as the call gave it when it was captured, on the meta device."""
        found = self.constants[self.leaves.index(HIDDEN)]
        assert isinstance(found, Tensor)
        return found

    def rebuilt(self, hidden: Tensor, call: Call) -> Any:
        """Return a result with a hidden state, what its call was given, and NaN where others stood."""
        given = by_place(call)
        leaves = [
            hidden if leaf is HIDDEN else given[leaf] if isinstance(leaf, str) else self._hole(constant, hidden)
            for leaf, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)

    def _hole(self, constant: Any, hidden: Tensor) -> Any:
        """Return what stands for a part that nobody has: of other sizes where the hidden state has others by now."""
        if not isinstance(constant, Tensor):
            return constant
        now = {(dim, was): size for dim, (was, size) in enumerate(zip(self.sample.shape, hidden.shape, strict=False))}
        changed = {was: size for (_, was), size in reversed(now.items()) if was != size}
        shape = [now.get((dim, was), changed.get(was, was)) for dim, was in enumerate(constant.shape)]
        return torch.full(shape, torch.nan if is_number(constant) else 0, dtype=constant.dtype, device=hidden.device)


@dataclass
class Flow:
    """What was found out of a model.

    Attributes:
        calls: the names of the layers, one for each call.
        results: what each call gives.
        beside: the names of the modules that each phase calls.
        weights: the names of the weights that each phase uses without calling their modules.
        buffers: the same of the buffers that are saved.
        entries: where each call is given its hidden state; empty where it is given none.
        keeps: for each call, whether it leaves a hidden state of the shape that it is given.
        arguments: for each call, what its layer is called with, where that is a hidden state and no other tensor.
        repeats: for each call, whether what it is called with depends on no hidden state but for that itself.
        riders: what travels besides the hidden state and the model's inputs.
        modes: for each call, the modes of torch that it runs under, apart from those around the model.
    """

    calls: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    beside: list[list[str]] = field(default_factory=lambda: [[]])
    weights: list[list[str]] = field(default_factory=lambda: [[]])
    buffers: list[list[str]] = field(default_factory=lambda: [[]])
    entries: list[str] = field(default_factory=list)
    keeps: list[bool] = field(default_factory=list)
    arguments: list[Call | None] = field(default_factory=list)
    repeats: list[bool] = field(default_factory=list)
    riders: list[Rider] = field(default_factory=list)
    modes: list[Modes | None] = field(default_factory=list)

    def is_like(self, other: Flow) -> bool:
        """Whether another one calls the same in the same way; samples and settings may be others."""
        forms = [[(r.spec, r.leaves, r.sample.shape, r.sample.dtype) for r in flow.results] for flow in (self, other)]
        names = ("calls", "beside", "weights", "buffers", "entries", "keeps", "repeats", "riders", "modes")
        return forms[0] == forms[1] and all(getattr(self, name) == getattr(other, name) for name in names)


def by_place(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by where they are in it."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def replaced(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with other leaves at some places."""
    flat, spec = tree_flatten_with_path(tree)
    return tree_unflatten([leaves.get(keystr(path), leaf) for path, leaf in flat], spec)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a tensor that may depend on weights."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def is_unknown(leaf: Any) -> bool:
    """Whether a leaf depends on what is not there."""
    return is_number(leaf) and bool(leaf.isnan().any())


class Stop(Exception):
    """Ends a walk."""


class SpanWalk(Walk):
    """Runs the part of the forward that a block is.

    Args:
        frame: of the model.
        device: where its tensors are.
        flow: what is known of the model.
        number: of the block.
        spans: all blocks.
        hidden: what the block is given; None for the first.
        taken: riders that it is given, by name.

    Attributes:
        left: the hidden state that it leaves.
        made: riders that it makes, by name.
        is_done: whether the rest of the forward does not matter.
    """

    def __init__(
        self,
        frame: Frame,
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
                return self.run(arguments)
            except Stop:
                return None

    def called(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what one of the block's own calls gives."""
        raise NotImplementedError

    def passed(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a call behind the block."""
        given = by_place((args, kwargs))
        for rider in [rider for rider in self._wanted if rider.found[0] == number]:
            self.made[rider.name] = given[rider.found[1]]
            self._wanted.remove(rider)
        self.is_done = not self._wanted or number == len(self.flow.calls) - 1

    def skipped(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return a hidden state of the shape that a call outside of the block leaves; its numbers mean nothing."""
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
        """Whether the code between layers trains, where it is the block's."""
        return False

    def _tell_training(self) -> None:
        self.frame.set_training(self.is_training() and self.calls in self.span.phases, as_model=True)

    def layer(self, layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call gives: its own result within the block, outside of it what stands for one."""
        span, result = self.span, self._known(layer, number)
        self._tell_training()
        if number < span.calls.start:
            is_given = number == span.calls.start - 1
            hidden = self.hidden if is_given else self.skipped(layer, number, args, kwargs)
            assert hidden is not None
            if is_given and self.is_training():  # code of other blocks has not trained, by which it may have switched
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

    def _known(self, layer: nn.Module, number: int) -> Result:
        name, calls = self.frame.name_of(layer), self.flow.calls
        if number >= len(calls) or name != calls[number]:
            raise MisfitError(
                f"call {number} of a layer is of {name!r}, and was of {(*calls, 'none')[min(number, len(calls))]!r} "
                "when the model was split: layers that are left out, or change their order, cannot be blocks"
            )
        return self.flow.results[number]


def hidden_of(result: Result, made: Any) -> Tensor:
    """Return the hidden state in what a call gave."""
    leaves = tree_flatten(made)[0]
    hidden = leaves[result.leaves.index(HIDDEN)]
    assert isinstance(hidden, Tensor)
    return hidden
