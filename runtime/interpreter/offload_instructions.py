"""Activations that leave a rank's memory, and activation offload to host memory and back.

Fwd              OffloadAct      computation            FetchAct           Bwd
begins to copy   memory is free  waits for the copy     begins to copy     waits for the copy

The copy to the host starts at the end of `Fwd`, not at `OffloadAct`, which frees the device memory. The next
computation may allocate that memory, and so waits for the copy. `lend_instructions` moves activations to other ranks
instead; `MovedActivations` has the state of both.
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
    """Tensors saved by a forward that leave the rank's memory.

    `leaves` are its inputs in the graph: their memory is freed too, but the tensors stay, to receive their gradients.
    """

    memories: list[SavedMemory]
    leaves: Outputs


class MovedActivations:
    """The activations of one rank that leave its memory between their forward and their backward.

    Args:
        flows: consumed and produced values of the program's instructions.
        waits: waits for copies and messages, and records them.
        link: issues the copies between device and host memory.
        device: where the rank computes.
        resident: returns the tensors whose memory is resident during a step in any case.
        saved: state that forwards save for backwards, by value.

    Attributes:
        flows, waits: the same.
        moves_some: whether the program offloads or lends anything.
        track: counts bytes saved on the device, if a count is active.
        first_after_free: indices of the computations that need memory which an instruction before them frees.
        pending_frees: waits until memory is free, each with the index of the instruction that frees it.
        pending_fetches: waits for activations on their way back, by value.
    """

    def __init__(
        self,
        flows: ProgramFlow,
        waits: Waits,
        link: HostLink,
        device: torch.device,
        resident: Callable[[], Iterable[Tensor]],
        saved: MutableMapping[Value, Any],
    ) -> None:
        self.flows, self.waits, self._link, self._saved = flows, waits, link, saved
        self.track: Track | None = None
        self._device, self._find_resident = device, resident
        moves = [i for i in flows.program if isinstance(i, FREES_MEMORY)]
        offloads = [i for i in moves if isinstance(i, ins.OffloadAct)]
        self._moving = frozenset(value for i in moves for value in flows.taken(i, ValueKind.SAVED))
        self._to_host = frozenset(value for i in offloads for value in flows.taken(i, ValueKind.SAVED))
        self.moves_some = bool(self._moving)
        self.first_after_free = _first_after_free(flows.program)
        self._resident: set[int] = set()
        self._leaving: dict[Value, Leaving] = {}
        self._copies: dict[Value, tuple[list[Tensor], Copy]] = {}
        self._on_host: dict[Value, list[SavedMemory]] = {}
        self.pending_frees: list[tuple[int, Wait]] = []
        self.pending_fetches: dict[Value, Wait] = {}

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
        """Keep a forward's saved activations until the instruction that moves them; if offloaded, start their copy."""
        self._leaving[saved] = leaving = Leaving(activations.memories(), leaves)
        if saved in self._to_host:
            self._copies[saved] = self._link.to_host([memory.bytes for memory in leaving.memories])

    def take_away(self, saved: Value, away: Value) -> Leaving:
        """Return activations that leave now, and move their forward's saved state from key `saved` to key `away`."""
        self._saved[away] = self._saved.pop(saved)
        return self._leaving.pop(saved)

    def take_back(self, away: Value, fetched: Value) -> None:
        """Move a forward's saved state from key `away` to key `fetched`: its activations are on their way back."""
        self._saved[fetched] = self._saved.pop(away)

    def free(self, index: int, saved: Value, offloaded: Value) -> None:
        """Free device memory after the copy of `leave`; the next computation waits for the copy."""
        if saved not in self._saved:
            return  # a unit that is skipped
        leaving, (copies, copy) = self.take_away(saved, offloaded), self._copies.pop(saved)
        self._link.release(copy)
        for memory, on_host in zip(leaving.memories, copies, strict=True):
            memory.leave(on_host)
        vacate(leaving.leaves)
        self._on_host[offloaded] = leaving.memories
        self.pending_frees.append((index, partial(self._wait, index, copy)))

    def fetch(self, index: int, offloaded: Value, fetched: Value) -> None:
        """Start the copy back to the device of those tensors that are still referenced."""
        if offloaded not in self._saved:
            return  # a unit that is skipped
        self.take_back(offloaded, fetched)
        memories = [memory for memory in self._on_host.pop(offloaded) if memory.handles]
        on_device, copy = self._link.to_device([memory.bytes for memory in memories])
        for memory, there in zip(memories, on_device, strict=True):
            memory.arrive(there)
        self.pending_fetches[fetched] = partial(self._wait, index, copy)

    def wait_for_frees(self, index: int) -> None:
        """Wait, as instruction `index`, until all memory is free that instructions before it free."""
        due = [wait for freed, wait in self.pending_frees if freed < index]
        self.pending_frees = [(freed, wait) for freed, wait in self.pending_frees if freed >= index]
        for wait in due:
            wait(index)

    def wait_for(self, fetched: Value, index: int) -> None:
        """Wait, as instruction `index`, until activations are back on the device; later calls return at once."""
        if fetched in self.pending_fetches:
            self.pending_fetches.pop(fetched)(index)

    def _wait(self, copied: int, copy: Copy, index: int) -> None:
        """Wait for a copy, and record its duration as that of instruction `copied`."""
        self.waits.wait_works((copy,), index)
        if self.waits.recorder is not None:
            self.waits.recorder.set_times(copied, start=copy.begin, end=copy.end)


def bind_offload_act(moved: MovedActivations, index: int, instruction: ins.OffloadAct) -> BoundCall:
    """Free the memory of activations that have been copied to the host."""
    (taken,) = moved.flows.taken(instruction, ValueKind.SAVED)
    (made,) = moved.flows.made(instruction, ValueKind.OFFLOADED)
    return partial(moved.free, index, taken, made)


def bind_fetch_act(moved: MovedActivations, index: int, instruction: ins.FetchAct) -> BoundCall:
    """Start the copy of offloaded activations back to the device."""
    (taken,) = moved.flows.taken(instruction, ValueKind.OFFLOADED)
    (made,) = moved.flows.made(instruction, ValueKind.FETCHED)
    return partial(moved.fetch, index, taken, made)


def after_frees(moved: MovedActivations, index: int, call: BoundCall) -> BoundCall:
    """Return the call of a computation, preceded by a wait for the memory that instructions just before it free."""
    if index not in moved.first_after_free:
        return call
    return in_turn(partial(moved.wait_for_frees, index), call)


def _first_after_free(program: Iterable[ins.Instruction]) -> frozenset[int]:
    """Return the indices of the first computation after each of `FREES_MEMORY`."""
    found, is_after = set(), False
    for index, instruction in enumerate(program):
        if instruction.computes and is_after:
            found.add(index)
        is_after = isinstance(instruction, FREES_MEMORY) or (is_after and not instruction.computes)
    return frozenset(found)
