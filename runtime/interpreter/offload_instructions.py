"""Activation offload to host memory and back: the instructions that start copies, and those that wait for them.

Fwd              OffloadAct      computation            FetchAct           Bwd
begins to copy   memory is free  waits for the copy     begins to copy     waits for the copy
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_values import Value, ValueKind

from ..autograd.saved_tensor_offload import SavedActivations, SavedMemory, Track, identities, vacate
from ..autograd.slice_kv_cache import Store
from ..comm.host_copies import Copy, HostLink
from ..comm.overlap_threads import BoundCall
from ..stage.stage_forward import Outputs
from .handlers.calls_bound_to_shapes import in_turn
from .program_dataflow import ProgramFlow
from .values_between_instructions import Waits


@dataclass
class _Leaving:
    """Tensors saved by a forward, on their way to the host; of its input `leaves` only the gradients are kept."""

    memories: list[SavedMemory]
    on_host: list[Tensor]
    copy: Copy
    leaves: Outputs


class HostCopies:
    """The copies of one rank's activations between device and host memory.

    Args:
        flows: consumed and produced values of the program's instructions.
        waits: records waits.
        link: issues the copies.
        device: where the rank computes.
        resident: returns the tensors whose memory is resident during a step in any case.
        kept: state that forwards keep for backwards, by value.

    Attributes:
        flows: consumed and produced values of the program's instructions.
        moves_some: whether the program offloads anything.
        track: counts bytes saved on the device, if a count is active.
        first_behind: indices of the first computation after each `OffloadAct`.
    """

    def __init__(
        self,
        flows: ProgramFlow,
        waits: Waits,
        link: HostLink,
        device: torch.device,
        resident: Callable[[], Iterable[Tensor]],
        kept: MutableMapping[Value, Any],
    ) -> None:
        self.flows, self._kept = flows, kept
        self.track: Track | None = None
        self._waits, self._link, self._device, self._find_resident = waits, link, device, resident
        offloads = [i for i in flows.program if isinstance(i, ins.OffloadAct)]
        self._moving = frozenset(value for i in offloads for value in flows.taken(i, ValueKind.SAVED))
        self.moves_some = bool(self._moving)
        self.first_behind = _first_behind(flows.program)
        self._resident: set[int] = set()
        self._leaving: dict[Value, _Leaving] = {}
        self._away: dict[Value, list[SavedMemory]] = {}
        self._room: list[tuple[int, Copy]] = []
        self._coming: dict[Value, tuple[int, Copy]] = {}

    def begin_step(self) -> None:
        """Start a step: collect the resident tensors anew."""
        self._resident = identities(self._find_resident())

    def moves(self, saved: Value) -> bool:
        """Whether the saved activations of a forward are offloaded."""
        return saved in self._moving

    def activations(self, store: Store | None) -> SavedActivations:
        """Return saved-tensor hooks for a forward; keys and values in `store` are not offloaded with it."""
        resident = self._resident

        def is_resident(storage: int) -> bool:
            return storage in resident or (store is not None and storage in identities(store.tensors()))

        return SavedActivations(self._device, is_resident, self.track)

    def leave(self, saved: Value, activations: SavedActivations, leaves: Outputs) -> None:
        """Start the copy of a forward's saved activations to the host."""
        memories = activations.memories()
        on_host, copy = self._link.to_host([memory.bytes for memory in memories])
        self._leaving[saved] = _Leaving(memories, on_host, copy, leaves)

    def free(self, index: int, saved: Value, offloaded: Value) -> None:
        """Free device memory after the copy of `leave`; the next computation waits for the copy."""
        if saved not in self._kept:  # a unit without samples
            return
        self._kept[offloaded] = self._kept.pop(saved)
        unit = self._leaving.pop(saved)
        self._link.release(unit.copy)
        for memory, on_host in zip(unit.memories, unit.on_host, strict=True):
            memory.leave(on_host)
        vacate(unit.leaves)
        self._away[offloaded] = unit.memories
        self._room.append((index, unit.copy))

    def fetch(self, index: int, offloaded: Value, fetched: Value) -> None:
        """Start the copy back to the device of those tensors that are still referenced."""
        if offloaded not in self._kept:
            return
        self._kept[fetched] = self._kept.pop(offloaded)
        memories = [memory for memory in self._away.pop(offloaded) if memory.handles]
        on_device, copy = self._link.to_device([memory.bytes for memory in memories])
        for memory, there in zip(memories, on_device, strict=True):
            memory.arrive(there)
        self._coming[fetched] = (index, copy)

    def wait_for_room(self, index: int) -> None:
        """Wait, as instruction `index`, until all freed activations are on the host."""
        while self._room:
            self._wait(index, *self._room.pop(0))

    def wait_for(self, fetched: Value, index: int) -> None:
        """Wait, as instruction `index`, until activations are back on the device; later calls return at once."""
        if fetched in self._coming:
            self._wait(index, *self._coming.pop(fetched))

    def _wait(self, index: int, copied: int, copy: Copy) -> None:
        """Wait for a copy, and record its duration as that of instruction `copied`."""
        self._waits.wait_works((copy,), index)
        if self._waits.recorder is not None:
            self._waits.recorder.mark(copied, start=copy.begin, end=copy.end)


def bind_offload_act(copies: HostCopies, index: int, instruction: ins.OffloadAct) -> BoundCall:
    """Free the memory of activations that have been copied to the host."""
    (taken,), (made,) = (
        copies.flows.taken(instruction, ValueKind.SAVED),
        copies.flows.made(instruction, ValueKind.OFFLOADED),
    )
    return partial(copies.free, index, taken, made)


def bind_fetch_act(copies: HostCopies, index: int, instruction: ins.FetchAct) -> BoundCall:
    """Start the copy of offloaded activations back to the device."""
    (taken,), (made,) = (
        copies.flows.taken(instruction, ValueKind.OFFLOADED),
        copies.flows.made(instruction, ValueKind.FETCHED),
    )
    return partial(copies.fetch, index, taken, made)


def with_room(copies: HostCopies, index: int, call: BoundCall) -> BoundCall:
    """Return a computation that first waits, where it follows an `OffloadAct`, until that memory is free."""
    if index not in copies.first_behind:
        return call
    return in_turn(partial(copies.wait_for_room, index), call)


def _first_behind(program: Iterable[ins.Instruction]) -> frozenset[int]:
    """Return the indices of the first computation after each `OffloadAct`."""
    found, is_behind = set(), False
    for index, instruction in enumerate(program):
        if instruction.computes and is_behind:
            found.add(index)
        is_behind = isinstance(instruction, ins.OffloadAct) or (is_behind and not instruction.computes)
    return frozenset(found)
