"""State that forwards change: it goes by microbatches, and each replica has its own; said once where there are several.

    self.calls += 1     self.average.lerp_(x.mean(0), 0.1)     u, v of a spectral norm     Layer.calls += 1

One process has it after all forwards of a step, each of several replicas after its own. Tables that are made where
there were none are no such state, and neither are the statistics of norms and the loads of experts, which replicas put
together.

Code of blocks may begin to change numbers later, by a flag that the loop sets, or where the meta device cannot run:

    self.amax = max(self.amax, float(x.abs().max()))

Those attributes, also of classes, and globals are looked at, once before and once behind a step or an evaluation, that
methods of blocks set outside of `__init__`, on whichever module; containers and namespaces in attributes that methods
name, by their entries if these are few (a table may grow); buffers of users' modules; tensors, by which they are and
the versions that torch counts; and in step 0, 1, 2, 4, 8, … the numbers of frozen weights, as of a teacher that begins
as a copy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..blocks.blocks import Parcel, State
from ..objects.spaces import OF_TORCH
from ..objects.user_code import is_of_library, methods_of, names_of, steps_in

_logger = logging.getLogger("quintsched.runtime")

_MOST_NAMED = 3

_MOST_ENTRIES, _MOST_NESTED = 32, 2
"""So many entries of a container are looked at, and so deep."""
_CONTAINERS = (list, tuple, dict, set, deque, SimpleNamespace)

_Numbers = tuple[float, float]
"""What tells the numbers of a weight."""


class _Mark(NamedTuple):
    """Which tensor something is, and how often it was written to."""

    of: ref[Tensor]
    place: int
    version: int


def state_named(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return what blocks were found to change, by its names."""
    return [*dict.fromkeys(name for name, _, _ in _own_state(blocks, parcels))]


def state_of_replicas(blocks: Sequence[nn.Module], parcels: Sequence[Parcel], *, buffers: bool) -> list[str]:
    """Return what of it replicas do not put together, by its names; `buffers`: these as well."""
    found = _own_state(blocks, parcels)
    return [
        *dict.fromkeys(
            name
            for name, module, state in found
            if not (state.is_new or isinstance(module, _NormBase)) and (state.is_attribute or buffers)
        )
    ]


def _own_state(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> Iterator[tuple[str, nn.Module | None, State]]:
    """Yield what users' modules in blocks, classes and globals have, and forwards change: its name, the module, if it
    is one's, and what it is.
    """
    for number, (block, parcel) in enumerate(zip(blocks, parcels, strict=True)):
        for state in parcel.state:
            if state.is_named:
                yield state.name, None, state
            if state.owner.startswith((".", " (")):
                path, _, rest = state.owner.partition(" (")
                module = block.get_submodule(path.removeprefix("."))
                if type(module).__module__.partition(".")[0] != __name__.partition(".")[0]:
                    place = f"{path}{rest.partition(')')[2]}{state.key and f'.{state.key}'}"
                    yield f"block {number} ({type(block).__name__}){place}", module, state


def replicas_line(found: Sequence[str], replicas: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or there is one replica."""
    if not found or replicas == 1:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which each of {replicas} replicas runs its own: it is not what one "
        "process has after all of them, nor what depends on it"
    )


def changed_line(found: Sequence[str], microbatches: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or a step has one microbatch."""
    if not found or microbatches < 2:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which a step has {microbatches}: it "
        "counts microbatches, not steps, and sees one at a time: let the training loop change what goes by steps"
    )


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{', '.join(found[:_MOST_NAMED])}{more}"


class LateState:
    """What code of some blocks may begin to change, by what it is called in messages.

    Args:
        blocks: by their numbers.
        are_whole: whether frozen weights are resident between steps, as they are without ZeRO-3.

    Attributes:
        places: their names, and where they are; known: what is named already.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, are_whole: bool) -> None:
        self.known: list[str] = []
        self._blocks = blocks if are_whole else {}
        self._frozen, self._is_first = dict[str, _Numbers](), True
        found = (
            place
            for number, block in blocks.items()
            for named in [[*block.named_modules()]]
            for keys in [{key for _, module in named for key in _kept_by(module)}]
            for path, module in named
            for place in _set_by(f"block {number} ({type(block).__name__}){path and f'.{path}'}", module, keys)
        )
        self.places = list({(place[0], id(place[1])): place for place in found}.values())
        self._before: list[Any] = []

    def begin(self, *, is_due: bool) -> None:
        """Note what they are before a step, or an evaluation; frozen weights too, where these are due."""
        self._before = self._now()
        self._frozen = dict(self._frozen_now()) if is_due else {}

    def tell(self, microbatches: int, replicas: int) -> None:
        """Write a line on those that a step has changed and nobody has named: they are not looked at any more."""
        now, frozen = self._now(), dict(self._frozen_now()) if self._frozen else {}
        moved = [name for name, numbers in frozen.items() if self._frozen.get(name, numbers) != numbers]
        if self._is_first:
            self.known += moved  # which `weights_unchanged` names
        self._is_first = False
        alike = [*map(_is_same, self._before, now)]
        if all(alike) and not moved:
            return
        changed = [place for place, is_same in zip(self.places, alike, strict=True) if not is_same]
        self.places = [place for place in self.places if place not in changed]
        names = [name for name in (*(place[0] for place in changed), *moved) if name not in self.known]
        self.known += names
        for line in filter(None, (changed_line(names, microbatches), replicas_line(names, replicas))):
            _logger.warning("%s", line)

    def _now(self) -> list[Any]:
        return [_mark_of(own.get(key)) for _, own, key in self.places]

    def _frozen_now(self) -> Iterator[tuple[str, _Numbers]]:
        for number, block in self._blocks.items():
            for name, weight in block.named_parameters():
                if not weight.requires_grad and type(weight) is nn.Parameter and not weight.is_complex():
                    numbers = weight.detach().double().nan_to_num()
                    yield (
                        f"block {number} ({type(block).__name__}).{name}",
                        (float(numbers.sum()), float(numbers.square().sum())),
                    )


def _mark_of(value: Any, depth: int = 0) -> Any:
    """Return what tells whether something has changed: of what nobody can tell, None."""
    if isinstance(value, (int, float, str)):
        return value
    if type(value) is Tensor:
        return _Mark(ref(value), id(value), 0 if value.is_inference() else value._version)
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if not isinstance(value, _CONTAINERS) or depth == _MOST_NESTED:
        return None
    if isinstance(value, dict):
        return {key: _mark_of(entry, depth + 1) for key, entry in islice(value.items(), _MOST_ENTRIES)}
    return [len(value), *(_mark_of(entry, depth + 1) for entry in islice(value, _MOST_ENTRIES))]


def _is_same(was: Any, now: Any) -> bool:
    """Whether marks are alike; a table may have more than before. A tensor that is gone may have left its place."""
    if isinstance(was, _Mark) and isinstance(now, _Mark):
        return was[1:] == now[1:] and was.of() is not None
    if isinstance(was, dict) and isinstance(now, dict):
        return all(key in now and _is_same(mark, now[key]) for key, mark in was.items())
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_is_same, was, now))
    return bool(was == now)


def _kept_by(module: nn.Module) -> set[str]:
    """Return the attributes that code of a module's class sets, other than when it is made."""
    if is_of_library(type(module)):
        return set()
    steps = (step for function in _later(type(module)) for step in steps_in(function.__code__))
    return {step.argval for step in steps if step.opname == "STORE_ATTR"}


def _later(kind: type) -> list[FunctionType]:
    return [function for function in methods_of(kind) if function.__name__ != "__init__"]


def _set_by(name: str, module: nn.Module, keys: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield what code may change of a module: `keys`, its buffers and containers, what its class has, and globals.

    Classes of libraries are not looked into.
    """
    kind = type(module)
    yield from ((f"{name}.{key}", module.__dict__, key) for key in sorted(keys) if key not in OF_TORCH)
    if is_of_library(kind):
        return
    yield from ((f"{name}.{key}", module._buffers, key) for key in module._buffers)
    for key in sorted(_kept_by(module)):
        yield from ((f"{base.__name__}.{key}", vars(base), key) for base in kind.__mro__ if key in vars(base))
    for function in _later(kind):
        held = {key for key in names_of(function.__code__) if isinstance(module.__dict__.get(key), _CONTAINERS)}
        yield from ((f"{name}.{key}", module.__dict__, key) for key in sorted(held - OF_TORCH))
        steps = (step for step in steps_in(function.__code__) if step.opname == "STORE_GLOBAL")
        yield from ((step.argval, function.__globals__, step.argval) for step in steps)
