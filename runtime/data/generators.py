"""The generators of random numbers that a loader's order follows from, as plain data for checkpoints.

of the process    torch's, Python's, numpy's
of the loader     those that torch's DataLoader and its samplers were given: `generator=…`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = list[Any]
"""Where each of some generators is: tensors, numbers, tuples, dicts."""

_OF_PROCESS = 3
"""So many come first that are those of the process."""


class Generators:
    """Those of the process, then those that `holders` were given, each once."""

    def __init__(self, holders: Iterable[Any] = ()) -> None:
        given = [getattr(holder, "generator", None) for holder in holders]
        own = {id(one): one for one in given if isinstance(one, torch.Generator)}
        own.pop(id(torch.default_generator), None)
        self._all: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (_numpys_state, _set_numpys_state),
            *((one.get_state, one.set_state) for one in own.values()),
        ]

    def states(self) -> State:
        """Return where they are."""
        return [read() for read, _ in self._all]

    def fit(self, states: State) -> bool:
        """Whether states are those of as many generators."""
        return len(states) == len(self._all)

    def set(self, states: State) -> None:
        """Let them be where they were; where there were others, only those of the process."""
        known = states if self.fit(states) else states[:_OF_PROCESS]
        for (_, put), state in zip(self._all, known, strict=False):
            put(state)


def _numpys_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    return {**state, "state": {**inner, "key": torch.from_numpy(inner["key"].view(np.int32).copy())}}


def _set_numpys_state(state: Mapping[str, Any]) -> None:
    key: Tensor = state["state"]["key"]
    np.random.set_state({**state, "state": {**state["state"], "key": key.numpy().view(np.uint32)}})
