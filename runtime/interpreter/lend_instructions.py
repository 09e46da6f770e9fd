"""Activations lent to another rank, which keeps them in its memory and returns them for their backward.

    lender   Fwd   LendAct    computation                                   ReclaimAct         Bwd
                   packs,     waits until it is sent                        posts a receive    waits for it
                   sends ────────────────┐                                      ┌───▲
    holder                               ▼                                      │
                              HoldAct    computation   …   ReturnAct            │      computation
                              posts a receive              waits for it, sends ─┘      waits until it is sent

    memories   ██████████  ███  █  ██  █  █████████  …      large ones are sent where they are: there is no room for a
    pieces     ├────────┤  ├───────────┤  ├───────┤  …      copy of all; small ones are copied, one behind the other

A loan is a few pieces, each one message. `LendAct` and `HoldAct` are issued before the computation that precedes them
in the program, so that their messages overlap with it; on a transport that matches messages by order alone, only where
nothing else lies between. `ReturnAct` and `ReclaimAct` keep their places in the program. A receive is posted once the
memory is free that earlier instructions of the rank free.

A holder learns the sizes of the pieces once: the first loan of a stage, for units of one shape, is preceded by a
message that lists them, and later loans have pieces of the same sizes. A forward that saves less fills part of them; of
one that saves more, memories that do not fit stay where they are. Where the first forward saves nothing, nothing is
lent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_values import Value

from ..autograd.saved_tensor_offload import SavedMemory, vacate
from ..comm import Work
from ..comm.checked.message_frame import Label
from ..comm.overlap_threads import BoundCall
from ..step_setup.unit_samples import UnitSpec
from ..watch.position_in_shared_memory import receive_code, send_code
from .instruction_state import RunState
from .send_and_receive import first_loan_tag

_logger = logging.getLogger(__name__)

PIECE_ALIGNMENT = 512
"""Bytes to which memories in a piece are aligned: as allocators of devices align tensors."""

PIECES, LEAST_PIECE = 16, 2**18
"""Memories are joined to pieces of at most 1/`PIECES` of a loan, or of `LEAST_PIECE` bytes, if that is more."""

MOST_PIECES = 64
"""Length of a list of sizes: a loan has at most 2 x `PIECES` + 1 pieces, as two neighbours exceed the limit of one."""

AWAY = torch.empty(0, dtype=torch.uint8, device="meta")
"""Bytes of memory that is lent, on the rank that lends it."""

_SAVES_MORE = (
    "stage %d saves %d bytes for the backward of a microbatch, and saved %d when one of its shape was first lent: what "
    "is more stays on the rank, beyond what the plan counts with; where the bytes depend on the data, compile with "
    "offload in place of lend"
)

Placed = tuple[int, int, BoundCall]
"""(place, index of the instruction, call)."""
Piece = list[tuple[SavedMemory, slice]]
"""Memories of a piece, each with the slice of the piece's bytes that it fills."""
Kind = tuple[int, int, UnitSpec]
"""Stage, the other rank, and the spec of the unit: loans of one kind have pieces of the same sizes."""


class LoanSizes:
    """Sizes of pieces, in bytes, that both ends know; `exceeded` are the stages of this rank that have saved more."""

    def __init__(self) -> None:
        self.known: dict[Kind, list[int]] = {}
        self.exceeded: set[int] = set()

    def note_more(self, stage: int, saved: int, sizes: Sequence[int]) -> None:
        """Warn that a stage has saved more than its loans have room for, the first time."""
        if stage not in self.exceeded:
            self.exceeded.add(stage)
            _logger.warning(_SAVES_MORE, stage, saved, sum(sizes))


def bind_loans(state: RunState) -> Iterator[Placed]:
    """Yield the calls that LendAct, HoldAct, ReturnAct and ReclaimAct are bound to."""
    sizes, ends, earliest = LoanSizes(), dict[tuple[int, int], LendingEnd | HoldingEnd](), 0
    for index, message in enumerate(state.flows.program):
        if not isinstance(message, ins.LOANS):
            continue
        loan = message.stage, message.microbatch
        if isinstance(message, ins.LendAct | ins.HoldAct):
            kind = LendingEnd if isinstance(message, ins.LendAct) else HoldingEnd
            ends[loan] = kind(state, sizes, index, message, earliest)
            earliest, calls = ends[loan].place, ends[loan].begin()
        else:
            calls = ends[loan].bind_end(index)
        for place, of, call in calls:
            yield place, of, state.current.unless_empty(message.microbatch, call)


class _LoanEnd:
    """One end of a loan, on the rank that lends or on the one that holds.

    Args:
        state: the state of this rank.
        sizes: the sizes of pieces that are known.
        index: index in the program of the first message, which is a `LendAct` or a `HoldAct`.
        message: that message; the one the other way is bound by `bind_end`.
        earliest: place of the loan before it; none is moved before that, as both ends learn sizes by the same loan.

    Attributes:
        place: the place in the program where its first messages are issued.
    """

    def __init__(self, state: RunState, sizes: LoanSizes, index: int, message: ins.Message, earliest: int) -> None:
        self._flows, self._current, self._waits = state.flows, state.current, state.waits
        self._moved, self._transport = state.compute.moved, state.messages.transport
        self._index, self._stage, self._unit, self._peer = index, message.stage, message.microbatch, message.peer
        self._sizes, self._tag = sizes, first_loan_tag(state.messages, message)
        self._pieces: list[Tensor] = []  # held, or in flight
        self._counts: list[object] = []  # for each of them, an object that counts it as saved as long as it lives
        self._works: list[Work] = []
        self.place = self._first_place(earliest)

    def _first_place(self, earliest: int) -> int:
        """Return the place of the first messages: the computation before them, if they may pass what lies between."""
        program, index = self._flows.program, self._index
        before = next((at for at in reversed(range(index)) if program[at].computes), index)
        return max(before, earliest) if before == index - 1 or self._transport.profile == "tagged" else index

    def _tag_and_label(self, index: int, *, of_sizes: bool = False) -> tuple[int, Label]:
        """Return tag and label of the messages at an index of the program: of pieces, or of their sizes."""
        kind = "sizes of lent activations" if of_sizes else "lent activations"
        at = self._stage, *divmod(self._unit, self._flows.plan.schedule.slices)
        return self._tag + of_sizes, Label(kind, *at, instruction=index)

    def _kind(self) -> Kind:
        shape = self._current.units.shapes[self._unit]
        assert shape is not None
        return self._stage, self._peer, shape.spec

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._transport.device)

    def _keep(self, piece: Tensor) -> Tensor:
        """Keep a piece, which counts as saved, until `_free`; return it."""
        self._pieces.append(piece)
        if self._moved.track is not None:
            self._counts.append(self._moved.track(piece))
        return piece

    def _receive(self, buffer: Tensor, index: int, *, of_sizes: bool = False) -> Work:
        """Post a receive into a buffer, for a message at an index of the program."""
        return self._transport.receiver(buffer, self._peer, *self._tag_and_label(index, of_sizes=of_sizes))()

    def _wait(self, code: int, index: int, receive: int | None = None) -> None:
        """Wait, as instruction `index`, for messages that are in flight."""
        works, self._works = self._works, []
        self._waits.wait_as(code, works, index, receive)

    def _free(self, code: int, index: int) -> None:
        """Wait, as instruction `index`, until the pieces are sent, and free them."""
        self._wait(code, index)
        self._pieces.clear()
        self._counts.clear()


class LendingEnd(_LoanEnd):
    """The end of a loan on the rank of its stage."""

    def __init__(self, state: RunState, sizes: LoanSizes, index: int, message: ins.Message, earliest: int) -> None:
        super().__init__(state, sizes, index, message, earliest)
        operands = self._flows.operands
        (self._saved,), (self._loan,) = operands[index].consumes, operands[index].produces
        self.place = max(self.place, 1 + next(at for at, own in enumerate(operands) if self._saved in own.produces))
        self._send = self._transport.sender(self._peer, *self._tag_and_label(index))
        self._send_sizes = self._transport.sender(self._peer, *self._tag_and_label(index, of_sizes=True))
        self._lent: list[Piece] = []

    def begin(self) -> list[Placed]:
        """Return the call of `LendAct`."""
        return [(self.place, self._index, self._lend)]

    def bind_end(self, index: int) -> list[Placed]:
        """Return the call of `ReclaimAct`."""
        (fetched,) = self._flows.operands[index].produces
        return [(index, index, partial(self._reclaim, index, fetched))]

    def _lend(self) -> None:
        """Send the saved tensors of a forward; the computation after `LendAct` waits until they are sent and freed."""
        leaving, kind = self._moved.take_away(self._saved, self._loan), self._kind()
        if kind not in self._sizes.known:
            self._sizes.known[kind] = sizes = sizes_of_pieces([memory.bytes.nbytes for memory in leaving.memories])
            listed = torch.tensor(sizes + [0] * (MOST_PIECES - len(sizes)), device=self._transport.device)
            self._works.append(self._send_sizes(listed))
        sizes = self._sizes.known[kind]
        self._lent = into_pieces(leaving.memories, sizes)
        if sum(map(len, self._lent)) < len(leaving.memories):
            self._sizes.note_more(self._stage, sum(memory.bytes.nbytes for memory in leaving.memories), sizes)
        for size, piece in zip(sizes, self._lent, strict=True):
            self._works.append(self._send(self._keep(self._joined(size, piece))))
            for memory, _ in piece:
                memory.leave(AWAY)
        vacate(leaving.leaves)
        self._moved.pending_frees.append((self._index, partial(self._free, send_code(self._index))))

    def _joined(self, size: int, piece: Piece) -> Tensor:
        """Return the bytes of a piece: those of its only memory, or copies."""
        if len(piece) == 1 and piece[0][0].bytes.nbytes == size:
            return piece[0][0].bytes
        joined = self._empty(size)
        for memory, span in piece:
            joined[span].copy_(memory.bytes)
        return joined

    def _reclaim(self, index: int, fetched: Value) -> None:
        """Post the receives of the pieces that come back, which the backward waits for."""
        self._moved.wait_for_frees(index)
        self._moved.take_back(self._loan, fetched)
        pieces, self._lent, works = self._lent, [], list[Work]()
        for size, piece in zip(self._sizes.known[self._kind()], pieces, strict=True):
            returned = self._empty(size)
            works.append(self._receive(returned, index))
            for memory, span in piece:
                if memory.handles:
                    memory.arrive(returned[span])
        self._moved.pending_fetches[fetched] = partial(self._waits.wait_as, receive_code(index), works, receive=index)


class HoldingEnd(_LoanEnd):
    """The end of a loan on the rank that holds it."""

    _is_posted = False  # whether the receives of this step's loan are posted

    def begin(self) -> list[Placed]:
        """Return the calls of `HoldAct`: only pieces of known sizes can be received ahead of its index."""
        ahead = partial(self._hold_known, self.place)
        return [(self.place, self._index, ahead), (self._index, self._index, self._hold)]

    def bind_end(self, index: int) -> list[Placed]:
        """Return the calls of `ReturnAct`.

        The computation after it waits until the pieces are sent, and frees them; without one, a last call does.
        """
        program, last = self._flows.program, len(self._flows.program) - 1
        self._send = self._transport.sender(self._peer, *self._tag_and_label(index))
        calls: list[Placed] = [(index, index, partial(self._return, index))]
        if not any(program[at].computes for at in range(index + 1, last)):
            calls.append((last, last, partial(self._moved.wait_for_frees, last)))
        return calls

    def _hold_known(self, place: int) -> None:
        """Post the receives of a loan at a place of the program, if the sizes are known and they are not posted yet."""
        sizes = self._sizes.known.get(self._kind())
        if sizes is not None and not self._is_posted:
            self._is_posted = True
            self._moved.wait_for_frees(place)
            self._works += [self._receive(self._keep(self._empty(size)), self._index) for size in sizes]

    def _hold(self) -> None:
        """Post the receives, unless they are in flight; the first loan of its kind waits for the sizes in the host."""
        kind = self._kind()
        if kind not in self._sizes.known:
            listed = torch.empty(MOST_PIECES, dtype=torch.int64, device=self._transport.device)
            self._works.append(self._receive(listed, self._index, of_sizes=True))
            self._wait(receive_code(self._index), self._index)
            self._sizes.known[kind] = [size for size in listed.tolist() if size]
        self._hold_known(self._index)

    def _return(self, index: int) -> None:
        """Wait until the pieces have been received, and send them back."""
        self._wait(receive_code(self._index), index, self._index)
        self._is_posted, self._works = False, [self._send(piece) for piece in self._pieces]
        self._moved.pending_frees.append((index, partial(self._free, send_code(index))))


def aligned(nbytes: int) -> int:
    """Return a number of bytes, up to the next multiple of `PIECE_ALIGNMENT`."""
    return -(-nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT


def sizes_of_pieces(nbytes: Sequence[int]) -> list[int]:
    """Return the sizes of the pieces for memories of these numbers of bytes: large ones have a piece each."""
    most, sizes = max(sum(map(aligned, nbytes)) // PIECES, LEAST_PIECE), list[int]()
    for size in nbytes:
        if sizes and aligned(sizes[-1]) + size <= most:
            sizes[-1] = aligned(sizes[-1]) + size
        else:
            sizes.append(size)
    return sizes


def into_pieces(memories: Sequence[SavedMemory], sizes: Sequence[int]) -> list[Piece]:
    """Return memories in pieces of given sizes, one behind the other, without those that do not fit."""
    pieces, ends = [Piece() for _ in sizes], [0 for _ in sizes]
    for memory in memories:
        nbytes = memory.bytes.nbytes
        number = next((n for n, size in enumerate(sizes) if ends[n] + nbytes <= size), None)
        if number is not None:
            pieces[number].append((memory, slice(ends[number], ends[number] + nbytes)))
            ends[number] += aligned(nbytes)
    return pieces
