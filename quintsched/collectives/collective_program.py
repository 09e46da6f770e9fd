"""Program of a collective, one per rank: chunks of the data are sent, received, and stored or added.

    rank 0   SendRecv(to 1, chunk 2, from 2, chunk 1, add)      both halves of a SendRecv run concurrently, and it
    rank 1   SendRecv(to 2, chunk 0, from 0, chunk 2, add)      ends when both are done: if all ranks of a ring sent
    rank 2   SendRecv(to 0, chunk 1, from 1, chunk 0, add)      first and then received, they would deadlock

Ranks are coordinates 0 … size-1 of one axis (or of a product of axes). The data is cut into equal chunks. Where each
rank has a part of its own (reduce-scatter, all-gather), part r is the r-th of `size` contiguous runs of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from quintsched.errors import counted
from quintsched.ir.instruction_set import Instruction

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]
Algorithm = Literal["ring", "tree", "two-level"]

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

MAX_SIZE = 256
"""Maximum number of ranks of a spelled-out collective."""

MAX_CHUNKS = 2**12
"""Maximum number of chunks of the data."""


@dataclass(frozen=True, slots=True)
class SendRecv(Instruction):
    """Send one chunk and receive another concurrently; `reduce` adds the received chunk, else it is stored."""

    to: int
    send_chunk: int
    source: int
    recv_chunk: int
    reduce: bool


@dataclass(frozen=True, slots=True)
class SendChunk(Instruction):
    """Send one chunk."""

    to: int
    chunk: int


@dataclass(frozen=True, slots=True)
class RecvChunk(Instruction):
    """Receive one chunk; `reduce` adds it to the local one, else it is stored."""

    source: int
    chunk: int
    reduce: bool


CollectiveStep = SendRecv | SendChunk | RecvChunk
COLLECTIVE_STEPS: tuple[type[CollectiveStep], ...] = (SendRecv, SendChunk, RecvChunk)


class Half(NamedTuple):
    """One end of a message: the send or the receive of `chunk` at `step` of the program of `rank`."""

    rank: int
    step: int
    peer: int
    chunk: int
    reduce: bool = False


class ChunkMessage(NamedTuple):
    """The k-th send of a directed channel with its k-th receive; together they are one event."""

    sent: Half
    received: Half


@dataclass(frozen=True, eq=False)
class CollectiveProgram:
    """Programs of one collective over an axis: `programs[r]` belongs to rank r.

    `nodes` is the number of equal runs of ranks that are on one node each, for which a two-level collective is spelled.
    Programs written by hand are not checked before they are proved; `CollectivePlan` adds the methods.
    """

    kind: CollectiveKind
    algorithm: Algorithm
    size: int
    chunks: int
    programs: tuple[tuple[CollectiveStep, ...], ...]
    nodes: int = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveProgram) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.kind, self.algorithm, self.size, self.chunks, self.programs, self.nodes

    @property
    def title(self) -> str:
        """One-line title: algorithm, kind, ranks, nodes and chunks."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.algorithm} {self.kind} over {counted(self.size, 'rank')}{nodes}, {counted(self.chunks, 'chunk')}"

    @cached_property
    def halves(self) -> tuple[tuple[Half, ...], tuple[Half, ...]]:
        """Sends and receives of all ranks, rank after rank, in program order."""
        places = [(rank, index, step) for rank, steps in enumerate(self.programs) for index, step in enumerate(steps)]
        return tuple(_sends(places)), tuple(_receives(places))

    @cached_property
    def messages(self) -> tuple[ChunkMessage, ...]:
        """Messages: the k-th send of each channel with its k-th receive; unmatched ends are left out."""
        waiting: dict[tuple[int, int], list[Half]] = {}
        sends, receives = self.halves
        for half in receives:
            waiting.setdefault((half.peer, half.rank), []).append(half)
        partners = {channel: iter(halves) for channel, halves in waiting.items()}
        pairs = ((half, next(partners.get((half.rank, half.peer), iter(())), None)) for half in sends)
        return tuple(ChunkMessage(sent, received) for sent, received in pairs if received is not None)

    def owner(self, chunk: int) -> int:
        """Rank whose part contains a chunk."""
        return chunk * self.size // self.chunks

    def half_place(self, half: Half) -> str:
        """Return the place of one end of a message as text: "rank 0 step 3, SendRecv(…)"."""
        return f"rank {half.rank} step {half.step}, {self.programs[half.rank][half.step]}"


def _sends(places: list[tuple[int, int, CollectiveStep]]) -> Iterator[Half]:
    for rank, index, step in places:
        if isinstance(step, SendRecv):
            yield Half(rank, index, step.to, step.send_chunk)
        elif isinstance(step, SendChunk):
            yield Half(rank, index, step.to, step.chunk)


def _receives(places: list[tuple[int, int, CollectiveStep]]) -> Iterator[Half]:
    for rank, index, step in places:
        if isinstance(step, SendRecv):
            yield Half(rank, index, step.source, step.recv_chunk, step.reduce)
        elif isinstance(step, RecvChunk):
            yield Half(rank, index, step.source, step.chunk, step.reduce)
