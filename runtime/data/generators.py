"""The generators of random numbers that a loader can draw from, and where they are, as plain data for checkpoints.

    of the process    torch's, Python's, numpy's
    of the loader     those that it, its samplers, its data set, what these consist of and their code can reach

What has no state of its own is brought back by these: they are set to where they were, and it draws again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..objects.reachable import reachable

State = list[Any]
"""Where each of some generators is: tensors, numbers, tuples, dicts."""

_OF_PROCESS = 3
"""So many come first that are those of the process."""

_UNSIGNED: Mapping[Any, Any] = {torch.int32: np.uint32, torch.int64: np.uint64}


@dataclass(frozen=True)
class _Generator:
    """One generator: how to ask where it is, and how to set it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Generators:
    """Those of the process, then those that some objects hold, each once, in the order in which they are found."""

    def __init__(self, *holders: Any) -> None:
        self._all = [
            _Generator(torch.get_rng_state, torch.set_rng_state),
            _Generator(random.getstate, random.setstate),
            _Generator(lambda: _plain(np.random.get_state(legacy=False)), lambda s: np.random.set_state(_arrays(s))),
            *(_generator(held) for held in _held(holders)),
        ]

    def states(self) -> State:
        """Return where they are."""
        return [generator.get() for generator in self._all]

    def changes(self, before: State | None) -> State:
        """Return where they are that are not where they were; None for the others."""
        now = self.states()
        if before is None or len(before) != len(now):
            return now
        return [None if is_alike(state, was) else state for state, was in zip(now, before, strict=True)]

    def fit(self, states: State) -> bool:
        """Whether states are those of as many generators."""
        return len(states) == len(self._all)

    def set(self, states: State) -> None:
        """Let them be where they were, but for None; where there were others, only those of the process."""
        known = states if self.fit(states) else states[:_OF_PROCESS]
        for generator, state in zip(self._all, known, strict=False):
            if state is not None:
                generator.set(state)


def is_alike(some: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(some, Tensor) and isinstance(other, Tensor):
        return torch.equal(some, other)
    if isinstance(some, Mapping) and isinstance(other, Mapping):
        return some.keys() == other.keys() and all(is_alike(some[key], other[key]) for key in some)
    if isinstance(some, list | tuple) and isinstance(other, list | tuple):
        return len(some) == len(other) and all(map(is_alike, some, other))
    return bool(some == other)


def _held(holders: Iterable[Any]) -> list[Any]:
    """Return the generators that objects, and their code, reach; those of the process are none of them."""
    kinds = torch.Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
    of_process = [torch.default_generator, np.random.mtrand._rand, getattr(random, "_inst", None)]
    return [
        found
        for found in reachable(holders)
        if isinstance(found, kinds)
        and not isinstance(found, random.SystemRandom)
        and all(found is not other for other in of_process)
    ]


def _generator(held: Any) -> _Generator:
    if isinstance(held, torch.Generator):
        return _Generator(held.get_state, held.set_state)
    if isinstance(held, random.Random):
        return _Generator(held.getstate, held.setstate)
    if isinstance(held, np.random.RandomState):
        return _Generator(lambda: _plain(held.get_state(legacy=False)), lambda state: held.set_state(_arrays(state)))
    bits = getattr(held, "bit_generator", held)
    return _Generator(lambda: _plain(bits.state), lambda state: setattr(bits, "state", _arrays(state)))


def _plain(state: Any) -> Any:
    """Return a state of numpy's with tensors in place of arrays."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(f"int{8 * state.itemsize}").copy())
    return state


def _arrays(state: Any) -> Any:
    """Return it with arrays again."""
    if isinstance(state, Mapping):
        return {key: _arrays(value) for key, value in state.items()}
    return state.numpy().view(_UNSIGNED[state.dtype]) if isinstance(state, Tensor) else state
