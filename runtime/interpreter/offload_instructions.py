"""Activations that leave a rank's memory, and activation offload to host memory and back.

Fwd              OffloadAct      computation            FetchAct           Bwd
begins to copy   memory is free  waits for the copy     begins to copy     waits for the copy

`lend_instructions` moves activations to other ranks instead; what both have in common is `MovedActivations`.
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

FREES_MEMORY = (ins.OffloadAct, ins.LendAct, ins.ReturnAct)
"""Instructions by which saved activations leave a rank's memory."""

Wait = Callable[[int], None]
"""Waits on behalf of the instruction of this index."""


@dataclass
class Leaving:
    """Tensors saved by a forward that leave the rank's memory; of its input `leaves` only the gradients are kept."""

    memories: list[SavedMemory]
    leaves: Outputs


class MovedActivations:
    """The activations of one rank that leave its memory between their forward and their backward.

    Args:
        flows: consumed and produced values of the program's instructions.
        waits: records waits.
        device: where the rank computes.
        resident: returns the tensors whose memory is resident during a step in any case.
        kept: state that forwards keep for backwards, by value.

    Attributes:
        flows: consumed and produced values of the program's instructions.
        waits: records waits.
        moves_some: whether the program offloads or lends anything.
        track: counts bytes saved on the device, if a count is active.
        first_behind: indices of computations that need memory which others before them free.
        room: waits for memory that activations leave, each with the index of an instruction: later ones need it.
        coming: waits for activations that come back.
    """

    def __init__(
        self,
        flows: ProgramFlow,
        waits: Waits,
        device: torch.device,
        resident: Callable[[], Iterable[Tensor]],
        kept: MutableMapping[Value, Any],
    ) -> None:
        self.flows, self.waits, self._kept = flows, waits, kept
        self.track: Track | None = None
        self._device, self._find_resident = device, resident
        moves = [i for i in flows.program if isinstance(i, FREES_MEMORY)]
        self._moving = frozenset(value for i in moves for value in flows.taken(i, ValueKind.SAVED))
        self.moves_some = bool(self._moving)
        self.first_behind = _first_behind(flows.program)
        self._resident: set[int] = set()
        self._leaving: dict[Value, Leaving] = {}
        self.room: list[tuple[int, Wait]] = []
        self.coming: dict[Value, Wait] = {}

    def begin_step(self) -> None:
        """Start a step: collect the resident tensors anew."""
        self._resident = identities(self._find_resident())

    def moves(self, saved: Value) -> bool:
        """Whether the saved activations of a forward leave the rank's memory."""
        return saved in self._moving

    def activations(self, store: Store | None) -> SavedActivations:
        """Return saved-tensor hooks for a forward; keys and values in `store` do not move with it."""
        resident = self._resident

        def is_resident(storage: int) -> bool:
            return storage in resident or (store is not None and storage in identities(store.tensors()))

        return SavedActivations(self._device, is_resident, self.track)

    def leave(self, saved: Value, activations: SavedActivations, leaves: Outputs) -> None:
        """Keep a forward's saved activations at hand until the instruction that moves them."""
        self._leaving[saved] = Leaving(activations.memories(), leaves)

    def take_away(self, saved: Value, away: Value) -> Leaving | None:
        """Return activations that move away now, known as `away` from here on; None for a unit without samples."""
        if saved not in self._kept:
            return None
        self._kept[away] = self._kept.pop(saved)
        return self._leaving.pop(saved)

    def take_back(self, away: Value, fetched: Value) -> bool:
        """Know activations as `fetched` from here on; return False for a unit without samples."""
        if away not in self._kept:
            return False
        self._kept[fetched] = self._kept.pop(away)
        return True

    def wait_for_room(self, index: int) -> None:
        """Wait, as instruction `index`, for all memory of `room` that it needs."""
        due = [wait for freed, wait in self.room if freed < index]
        self.room = [(freed, wait) for freed, wait in self.room if freed >= index]
        for wait in due:
            wait(index)

    def wait_for(self, fetched: Value, index: int) -> None:
        """Wait, as instruction `index`, until activations are back on the device; later calls return at once."""
        if fetched in self.coming:
            self.coming.pop(fetched)(index)


class HostCopies(MovedActivations):
    """Moved activations, and the copies of some of them between device and host memory, which `link` issues."""

    def __init__(
        self,
        flows: ProgramFlow,
        waits: Waits,
        link: HostLink,
        device: torch.device,
        resident: Callable[[], Iterable[Tensor]],
        kept: MutableMapping[Value, Any],
    ) -> None:
        super().__init__(flows, waits, device, resident, kept)
        self._link = link
        offloads = [i for i in flows.program if isinstance(i, ins.OffloadAct)]
        self._to_host = frozenset(value for i in offloads for value in flows.taken(i, ValueKind.SAVED))
        self._copies: dict[Value, tuple[list[Tensor], Copy]] = {}
        self._away: dict[Value, list[SavedMemory]] = {}

    def leave(self, saved: Value, activations: SavedActivations, leaves: Outputs) -> None:
        """Also start the copy to the host, of a forward's saved activations that go there."""
        super().leave(saved, activations, leaves)
        if saved in self._to_host:
            self._copies[saved] = self._link.to_host([memory.bytes for memory in self._leaving[saved].memories])

    def free(self, index: int, saved: Value, offloaded: Value) -> None:
        """Free device memory after the copy of `leave`; the next computation waits for the copy."""
        unit = self.take_away(saved, offloaded)
        if unit is None:
            return
        copies, copy = self._copies.pop(saved)
        self._link.release(copy)
        for memory, on_host in zip(unit.memories, copies, strict=True):
            memory.leave(on_host)
        vacate(unit.leaves)
        self._away[offloaded] = unit.memories
        self.room.append((index, partial(self._wait, index, copy)))

    def fetch(self, index: int, offloaded: Value, fetched: Value) -> None:
        """Start the copy back to the device of those tensors that are still referenced."""
        if not self.take_back(offloaded, fetched):
            return
        memories = [memory for memory in self._away.pop(offloaded) if memory.handles]
        on_device, copy = self._link.to_device([memory.bytes for memory in memories])
        for memory, there in zip(memories, on_device, strict=True):
            memory.arrive(there)
        self.coming[fetched] = partial(self._wait, index, copy)

    def _wait(self, copied: int, copy: Copy, index: int) -> None:
        """Wait for a copy, and record its duration as that of instruction `copied`."""
        self.waits.wait_works((copy,), index)
        if self.waits.recorder is not None:
            self.waits.recorder.mark(copied, start=copy.begin, end=copy.end)


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


def with_room(moved: MovedActivations, index: int, call: BoundCall) -> BoundCall:
    """Return a computation that first waits, where it follows an instruction of `FREES_MEMORY`, until that is free."""
    if index not in moved.first_behind:
        return call
    return in_turn(partial(moved.wait_for_room, index), call)


def _first_behind(program: Iterable[ins.Instruction]) -> frozenset[int]:
    """Return the indices of the first computation after each of `FREES_MEMORY`."""
    found, is_behind = set(), False
    for index, instruction in enumerate(program):
        if instruction.computes and is_behind:
            found.add(index)
        is_behind = isinstance(instruction, FREES_MEMORY) or (is_behind and not instruction.computes)
    return frozenset(found)
