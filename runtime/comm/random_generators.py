"""Global random generators: torch's, a device's, Python's and numpy's, read, restored and temporarily seeded.

    with draws_undone(): …                 whatever is drawn, generators are as before
    with SeededGenerators(seed, device): … draws of this seed; other threads wait

Ranks that are threads of one process have the generators in common, so that all of this is done under one lock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .device import ACCELERATORS

_state_of_host = torch.default_generator.get_state
_bytes_at = (c_char * _state_of_host().nbytes).from_address  # in a tenth of the time of a view by numpy

GENERATORS = threading.RLock()
"""Held while torch's global generators are read, set, or temporarily seeded: ranks that are threads share them."""


def generator_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the state of torch's global random generators: the CPU's, and a device's."""
    with GENERATORS:
        host = torch.default_generator.get_state()
        return (host, torch.get_device_module(device).get_rng_state(device)) if device.type in ACCELERATORS else (host,)


def generator_bytes(device: torch.device) -> bytes:
    """Return the same states as bytes, which are compared in a fraction of the time of tensors."""
    return generator_reader(device)()


def generator_reader(device: torch.device) -> Callable[[], bytes]:
    """Return a function that reads the states as bytes."""
    if device.type in ACCELERATORS:
        return lambda: b"".join([state.numpy().tobytes() for state in generator_states(device)])
    return _bytes_of_host


def _bytes_of_host() -> bytes:
    with GENERATORS:
        state = _state_of_host()
    return _bytes_at(state.data_ptr()).raw


def restore_generators(device: torch.device, states: tuple[Tensor, ...]) -> None:
    """Restore the global random generators to states from `generator_states`."""
    with GENERATORS:
        torch.set_rng_state(states[0])
        if device.type in ACCELERATORS:
            torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def fork_generators(device: torch.device) -> Iterator[None]:
    """Return a context that restores the global random generators at its end."""
    before = generator_states(device)
    try:
        yield
    finally:
        restore_generators(device, before)


class SeededGenerators:
    """Context in which torch's global generators are seeded; they are restored at its end.

    Other threads cannot read, set or seed them meanwhile, except where this one waits for them (`generators_lent`).
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self.device = seed, device

    def __enter__(self) -> SeededGenerators:
        GENERATORS.acquire()
        SEEDED.setdefault(threading.get_ident(), []).append(self)
        self.before = generator_states(self.device)
        torch.default_generator.manual_seed(self._seed)
        if self.device.type in ACCELERATORS:
            torch.get_device_module(self.device).manual_seed(self._seed)
        return self

    def __exit__(self, *_: object) -> None:
        restore_generators(self.device, self.before)
        thread = threading.get_ident()
        SEEDED[thread].pop()
        if not SEEDED[thread]:
            del SEEDED[thread]
        GENERATORS.release()


SEEDED: dict[int, list[SeededGenerators]] = {}
"""Active `SeededGenerators` contexts of each thread, the outermost first."""


@contextmanager
def generators_lent() -> Iterator[None]:
    """Return a context in which this thread, which has seeded the generators, waits for threads that may draw."""
    contexts = SEEDED.pop(threading.get_ident())
    now = generator_states(contexts[0].device)
    restore_generators(contexts[0].device, contexts[0].before)
    for _ in contexts:
        GENERATORS.release()
    try:
        yield
    finally:
        for _ in contexts:
            GENERATORS.acquire()
        contexts[0].before = generator_states(contexts[0].device)
        restore_generators(contexts[0].device, now)
        SEEDED[threading.get_ident()] = contexts


class AllGenerators:
    """Snapshot of all global generators: torch's, a device's, Python's and numpy's."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cpu") if device is None else device
        self._states = generator_states(self._device), random.getstate(), np.random.get_state(legacy=False)

    def have_moved(self) -> bool:
        """Whether any of them has another state now."""
        of_torch, of_python, of_numpy = AllGenerators(self._device)._states
        is_same = all(map(torch.equal, self._states[0], of_torch)) and self._states[1] == of_python
        return not (is_same and _is_same_state(self._states[2], of_numpy))

    def put_back(self) -> None:
        """Restore their states."""
        of_torch, of_python, of_numpy = self._states
        restore_generators(self._device, of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _is_same_state(one: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same_state(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


_undoing: dict[int, AllGenerators] = {}
"""Generator states to restore, by thread: several threads' contexts may overlap."""


@contextmanager
def draws_undone(device: torch.device | None = None) -> Iterator[None]:
    """Return a context that restores all global generators, also to before overlapping contexts of other threads."""
    thread = threading.get_ident()
    is_outermost = thread not in _undoing
    with GENERATORS:
        before = next(iter(_undoing.values()), None) if is_outermost else None
        before = AllGenerators(device) if before is None else before
        if is_outermost:
            _undoing[thread] = before
    try:
        yield
    finally:
        with GENERATORS:
            if is_outermost:
                del _undoing[thread]
            before.put_back()
