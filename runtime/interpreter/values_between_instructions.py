"""Cells: values between two instructions of a rank, with the receives and sends that fill and drain them.

RecvAct ──works──▶ ┌──────┐                    Fwd ──value──▶ ┌──────┐ ──▶ SendAct: in flight until it is received
                   │ cell │ ──take: waits──▶ Fwd              │ cell │
                   └──────┘                                   └──────┘ ──▶ or the next stage on this rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from quintsched.ir.instruction_values import Value, ValueKind

from ..blocks.trees import TensorSpec
from ..comm import Work
from ..stage.stage_forward import Outputs
from ..watch.position_in_shared_memory import NOTHING, NOWHERE, WaitCell
from .program_dataflow import activation_of
from .trace_recorder import Recorder

_MOST_VIEWS = 64
"""Number of views (shapes) that are cached per buffer."""

RowParts = Sequence[tuple[Value, Sequence[int]]]
"""Values that together make up one row of tensors, each with the places of its tensors in the row."""


class ValueCell:
    """Slot of one value, from the instruction that makes it to the one that takes it; if sent, until the send is done.

    Attributes:
        value: its tensors; of a received value, the buffers that it is received into.
        works: the receive in flight, which is waited for when the value is taken; none once it has been.
        sent: the sends in flight, and the tensors that they read, which it keeps alive; None: none in flight.
        receive: the index of its receive in the program; None: it is computed on this rank.
        receive_code, send_code: codes in the watch cell while its receive, or its send, is waited for.
    """

    __slots__ = ("receive", "receive_code", "send_code", "sent", "value", "works")

    def __init__(self) -> None:
        self.value: Outputs = ()
        self.works: Sequence[Work] = ()
        self.sent: tuple[Sequence[Work], Outputs] | None = None
        self.receive: int | None = None
        self.receive_code = self.send_code = NOTHING


class AllWorks:
    """Several works, waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


class ReceiveBuffers:
    """The receive buffers of one rank: numbered within a kind, each with room for the largest message it has held.

    A kind is the set of tensors that share buffers: those of one shape and dtype when the program is bound, whatever
    their shapes in later steps. A received tensor is a view of the buffer's bytes, so that changing shapes need
    no more buffers than constant ones. `room_for` returns the size of the frame that the transport appends to a message
    of so many bytes.

    Attributes:
        generation: increases when a buffer is made or grows, and when another plan runs than before: bound receives
            are then out of date.
    """

    def __init__(self, device: torch.device, room_for: Callable[[int], int]) -> None:
        self._device, self._room_for = device, room_for
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._views: dict[tuple[int, int], dict[TensorSpec, Tensor]] = {}
        self.generation = 0

    def buffer_of(self, kind: int, number: int, spec: TensorSpec) -> Tensor:
        """Return a buffer viewed as a tensor of a spec."""
        key = kind, number
        views = self._views.setdefault(key, {})
        if spec not in views:
            memory, nbytes = self._memory.get(key), spec.nbytes + self._room_for(spec.nbytes)
            if memory is None or memory.nbytes < nbytes:
                memory = self._memory[key] = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
                views.clear()
                self.generation += 1
            if len(views) >= _MOST_VIEWS:
                views.clear()
            views[spec] = memory[: spec.nbytes].view(spec.dtype).view(spec.shape)
        return views[spec]

    def room(self, kind: int, number: int, spec: TensorSpec) -> Tensor | None:
        """Return the bytes of a buffer with the transport's frame after them; None where there is no frame."""
        more = self._room_for(spec.nbytes)
        return self._memory[kind, number][: spec.nbytes + more] if more else None


class Waits:
    """Waits for other ranks and host copies; in a recorded step, their time is that of the waiting instruction.

    While a message is waited for, `watch_cell` has its code (for hang detection); collectives publish their own. A wait
    that raises leaves its code there, so that the watch can say what the rank was waiting for when it failed.
    """

    def __init__(self, watch_cell: WaitCell) -> None:
        self.watch_cell = watch_cell
        self.recorder: Recorder | None = None

    def waiter(self, index: int) -> Callable[[Iterable[Work]], None]:
        """Return a function that waits for works on behalf of instruction `index`."""
        return partial(self.wait_works, index=index)

    def wait_works(self, works: Iterable[Work], index: int, receive: int | None = None) -> None:
        """Wait for works; the time is recorded for instruction `index`, and for instruction `receive`, if given."""
        recorder = self.recorder
        if recorder is None:
            for work in works:
                work.wait()
            return
        since = recorder.now()
        for work in works:
            work.wait()
        until = recorder.now()
        recorder.add_wait(index, since, until)
        if receive is not None:
            recorder.add_wait(receive, since, until)
            recorder.set_times(receive, end=until)

    def wait_as(self, code: int, works: Iterable[Work], index: int, receive: int | None = None) -> None:
        """Wait as `wait_works` does, with `code` in the watch cell meanwhile."""
        memory, at = self.watch_cell.memory, self.watch_cell.at
        memory[at] = code
        self.wait_works(works, index, receive)
        memory[at] = NOTHING


class ValueCells:
    """All cells of one bound program; another program of the rank has its own.

    Attributes:
        sending: cells whose values are sent to other ranks.
    """

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._cells: dict[Value, ValueCell] = {}
        self.sending: list[ValueCell] = []

    def cell_of(self, value: Value) -> ValueCell:
        """Return the cell of a value."""
        if value not in self._cells:
            self._cells[value] = ValueCell()
        return self._cells[value]

    def cell_of_row(self, parts: RowParts) -> ValueCell | None:
        """Return the cell of values that make up one row of a single tensor; None for other rows."""
        return self.cell_of(parts[0][0]) if len(parts) == 1 and [*parts[0][1]] == [0] else None

    def source(
        self, parts: RowParts, index: int
    ) -> tuple[ValueCell | None, Callable[[], None], Callable[[], Outputs] | None]:
        """Return (cell, wait, take) for the row of tensors that instruction `index` takes.

        A row of one tensor has a cell and a function that waits for it, so that the caller takes it without a call; any
        other row has a function that waits for it and takes it. Without values, there is neither cell nor `take`.
        """
        cell = self.cell_of_row(parts)
        if cell is not None:
            return cell, self.awaiter(parts[0][0], index), None
        return None, do_nothing, self.row_taker(parts, index) if parts else None

    def taker(self, value: Value, index: int) -> Callable[[], Outputs]:
        """Return a function that takes a value for instruction `index`, and waits for its receive if there is one."""
        cell, await_value = self.cell_of(value), self.awaiter(value, index)

        def take() -> Outputs:
            if cell.works:
                await_value()
            taken, cell.value = cell.value, ()
            return taken

        return take

    def awaiter(self, value: Value, index: int) -> Callable[[], None]:
        """Return a function that waits for the receive of a value, if any, on behalf of instruction `index`.

        A received gradient implies that the activation it belongs to has arrived, so that its send is released too.
        """
        cell, waits, watch_cell = self.cell_of(value), self._waits, self._waits.watch_cell
        activation = self.cell_of(activation_of(value)) if value.kind is ValueKind.OUTPUT_GRAD else ValueCell()

        def wait() -> None:
            works, cell.works = cell.works, ()
            if not works:
                return
            memory, at = watch_cell.memory, watch_cell.at
            memory[at] = cell.receive_code
            if waits.recorder is not None:
                waits.wait_works(works, index, cell.receive)
                self.release(activation, index)
            else:  # `wait_works` and `release`, written out: a call less for each message
                for work in works:
                    work.wait()
                if (sent := activation.sent) is not None:
                    activation.sent, memory[at] = None, activation.send_code
                    for work in sent[0]:
                        work.wait()
            memory[at] = NOTHING

        return wait

    def row_taker(self, parts: RowParts, index: int) -> Callable[[], Outputs]:
        """Return a function that takes several values as one row of tensors, which has None where there is no value."""
        width = 1 + max([max(places) for _, places in parts])
        if len(parts) == 1 and len(parts[0][1]) == width:
            return self.taker(parts[0][0], index)
        takers = [(self.taker(value, index), places) for value, places in parts]

        def take() -> Outputs:
            row: list[Tensor | None] = [None] * width
            for taker, places in takers:
                for place, tensor in zip(places, taker(), strict=True):
                    row[place] = tensor
            return tuple(row)

        return take

    def row_storer(self, parts: RowParts) -> Callable[[Outputs], None]:
        """Return a function that stores a row of tensors in the cells of its values."""
        cells = [(self.cell_of(value), places) for value, places in parts]
        only, places_of_only = cells[0]
        width = len(places_of_only) if len(cells) == 1 and [*places_of_only] == [*range(len(places_of_only))] else -1

        def store(row: Outputs) -> None:
            if len(row) == width:
                only.value = row
                return
            for cell, places in cells:
                cell.value = tuple([row[place] for place in places])

        return store

    def release(self, cell: ValueCell, index: int) -> None:
        """Wait for the sends from a cell, then drop the tensors that were sent."""
        sent, cell.sent = cell.sent, None
        if sent is not None:
            self._waits.wait_as(cell.send_code, sent[0], index)

    def release_sends(self) -> None:
        """Release the sends of the previous step: the next one, of any plan, begins when they are complete."""
        for cell in self.sending:
            if cell.sent is not None:
                self.release(cell, NOWHERE)  # nothing is recorded between steps


def do_nothing() -> None:
    """Do nothing."""
