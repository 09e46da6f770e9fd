"""Blocks in pairs, or of cut sequences, that may do something else in a later step are followed where anything is new.

    shapes      units of other lengths or numbers of samples ─▶ other functions on the meta device? ─▶ followed again
    attributes  self.hot = True, config.t = 3, a global       ─▶ noticed before the next step       ─▶ followed again

A step of known shapes, before which nothing was set, is not looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quintsched.errors import MisfitError

from ...blocks.blocks import Parcel, accepted_extras
from ...blocks.shapes import trace_shapes
from ...blocks.trees import TreeSpec
from ...comm import SelfGroup
from .arrivals import Arrival, Arrivals, FirstUnits
from .bench import Bench, Kind
from .reads.plain_state import State, has_changed, plain_state
from .trial import Setting


@dataclass
class Followed:
    """A kind of block whose pairs are followed, with the functions that it is known to call, and what it was given."""

    kind: Kind
    is_asked: bool
    arrival: Arrival
    known: set[tuple[str, ...]] = field(default_factory=set)


class LaterSteps:
    """Follows the pairs of a rank's blocks, and the tokens of sequences that are cut, from step to step.

    Args:
        bench: where blocks are run.
        outlines: all blocks, on the meta device.
        dtype: of the weights; None: as they are built.
    """

    def __init__(self, bench: Bench, outlines: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._bench, self._outlines, self._dtype = bench, outlines, dtype
        self._followed: list[Followed] = []
        self._of_tokens: list[Followed] = []
        self._setting, self._lengths = Setting(), set[str]()
        self._watched: list[tuple[Mapping[Any, Any], Any, object, str]] = []

    def follow(self, pairs: Sequence[Followed], of_tokens: Sequence[Followed], setting: Setting) -> None:
        """Follow kinds of blocks with pairs from now on, and those whose sequences are cut in this setting."""
        self._followed, self._of_tokens, self._setting = list(pairs), list(of_tokens), setting
        self._watch()

    def _watch(self) -> None:
        found: State = {}
        for followed in (*self._followed, *self._of_tokens):
            for block in followed.kind.blocks:
                found |= plain_state(block)
        self._watched = [(held, key, value, name) for (_, key), (held, value, name) in found.items()]

    def unsound_shapes(self, units: FirstUnits, parcels: Sequence[Parcel]) -> str:
        """Return which pairs are none where units are of these shapes, in words; empty: all are."""
        arrivals: Arrivals | None = None
        for followed in self._followed:
            number = followed.kind.number
            called = self._called(number, units, parcels)
            if called is not None and called in followed.known:
                continue
            if arrivals is None:
                alone = SelfGroup(0, self._bench.group.device)
                arrivals = Arrivals(units, self._outlines, parcels, alone, 1, self._dtype, samples=None)
            why = self._bench.why(
                followed.kind,
                arrivals.at(number, self._outlines[number]),
                followed.kind.choice,
                is_asked=followed.is_asked,
            )
            if why:
                return self._bench.refusal(followed.kind, f"given {units.spec}, {why}")
            if called is not None:
                followed.known.add(called)
        return ""

    def unsound_lengths(self, units: FirstUnits, parcels: Sequence[Parcel], *, is_known: bool = False) -> str:
        """Return which sequences may not be cut into units of these shapes, in words; `is_known`: all are."""
        shape = f"{units.spec} {units.extra_specs}"
        if not self._of_tokens or shape in self._lengths:
            return ""
        self._lengths.add(shape)
        cuts, device = self._setting.cuts, self._bench.group.device
        copies = (list(each) * cuts for each in (units.inputs, units.targets, units.extras))
        joined = FirstUnits(units.spec, units.extra_specs, *copies)
        arrivals: Arrivals | None = None
        for followed in () if is_known else self._of_tokens:
            kind, number = followed.kind, followed.kind.number
            arrivals = arrivals or Arrivals(joined, self._outlines, parcels, SelfGroup(0, device), cuts, self._dtype)
            arrival = arrivals.at(number, self._outlines[number])
            why = self._bench.why_tokens_meet(kind, arrival, self._setting)
            if why:
                return self._bench.refusal_of_tokens(kind, self._setting, f"given {units.spec}, {why}")
        return ""

    def require_sound_state(self) -> None:
        """Raise `MisfitError` where something was set by which pairs are none any more."""
        changed = [name for held, key, value, name in self._watched if has_changed(held, key, value)]
        if not changed:
            return
        for followed in self._followed:
            for block in followed.kind.blocks:
                _copy_state(plain_state(block), plain_state(followed.kind.blueprint.bare), set(changed))
                why = self._bench.why(followed.kind, followed.arrival, followed.kind.choice, is_asked=followed.is_asked)
                if why:
                    raise MisfitError(self._bench.refusal(followed.kind, f"{changed[0]!r} was set, and now {why}"))
            followed.known.clear()
        for followed in self._of_tokens:
            for block in followed.kind.blocks:
                _copy_state(plain_state(block), plain_state(followed.kind.blueprint.bare), set(changed))
                why = self._bench.why_tokens_meet(followed.kind, followed.arrival, self._setting)
                if why:
                    why = f"{changed[0]!r} was set, and now {why}"
                    raise MisfitError(self._bench.refusal_of_tokens(followed.kind, self._setting, why))
        self._lengths.clear()
        self._watch()

    def _called(self, number: int, units: FirstUnits, parcels: Sequence[Parcel]) -> tuple[str, ...] | None:
        """Return which functions a block calls for units of these shapes, in both modes; None: only data can tell."""
        block, before = self._outlines[number], parcels[number - 1] if number else None
        given = units.spec if before is None else before.output
        riders = {} if before is None else {name: TreeSpec.plain(spec) for name, spec in before.riders}
        accepts = accepted_extras(block)
        beside = {name: spec for name, spec in {**units.extra_specs, **riders}.items() if accepts(name)}
        calls = _Calls()
        try:
            for trains in (True, False):
                with calls:
                    trace_shapes([copy.deepcopy(block).train(trains)], given, beside, self._dtype)
        except Exception:
            return None
        return tuple(calls.found)


class _Calls(TorchDispatchMode):
    """Notes which functions are called, with all arguments but sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(
            kwargs or {}
        )
        self.found.append(str(func))
        for name, value in given.items():
            self.found += [_word(leaf, is_place=name.startswith("dim")) for leaf in tree_leaves(value)]
        return func(*args, **(kwargs or {}))


def _word(leaf: object, *, is_place: bool) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dim()} {leaf.dtype}"
    return "int" if type(leaf) is int and not is_place else repr(leaf)


def _copy_state(real: State, bare: State, changed: Set[str]) -> None:
    """Give a block that stands for another what has changed in that, where it is plain: all else may be cut there."""
    places = {name: (held, key) for (_, key), (held, _, name) in bare.items()}
    for (_, key), (held, _, name) in real.items():
        around = name.rpartition(".")[0]
        is_new = name not in places and around in changed
        there, _ = places.get(name) or places.get(around) or (None, "")
        if key != "" and isinstance(there, dict) and there is not held and (is_new or name in changed):
            there[key] = copy.copy(held[key])
