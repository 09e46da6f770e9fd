"""Small all-reduces over gloo: each member sends its tensor to all others, and combines them in the order of ranks.

    rank 0   send ──▶ pair of messages upwards   ──▶ posted since the last reduction   rank 1
             posted since the last reduction ◀── pair of messages downwards ◀── send

gloo's own is a ring of several segments, each way, driven by other threads: two ranks wake each other four times where
one message each way will do. Between two ranks a ring sends as many bytes, so theirs may be larger.

Each direction has a process group of its own. A gloo pair is locked while a message is posted on it, also while the
system call wakes the peer; meanwhile gloo's own thread, woken by what the peer sends back, polls for that lock, and may
keep the processor from its owner for milliseconds. What comes back on another pair needs another lock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quintsched.errors import MisfitError

from ..transport_interface import ReduceOp

SMALL_GROUP, SMALL_BYTES, PAIR_BYTES = 4, 2**11, 2**18
EXCHANGE_TAGS = 2**31 - 2**16
"""Tags from here on are those of small all-reduces, two for each group."""

_WIPED = b"\xff" * 8
_COMBINED: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


class DirectedGroups(NamedTuple):
    """Process groups of all ranks, for messages to higher ranks and to lower ones."""

    upwards: dist.ProcessGroup
    downwards: dist.ProcessGroup

    def between(self, source: int, destination: int) -> dist.ProcessGroup:
        """Return the process group of messages from one rank to another."""
        return self.upwards if source < destination else self.downwards


class _Posted:
    """A receive in flight from one member, into memory for the longest tensor; bytes not received to are wiped."""

    __slots__ = ("bytes", "memory", "work")

    def __init__(self, size: int) -> None:
        self.memory = torch.full((size + len(_WIPED),), 0xFF, dtype=torch.uint8)
        self.bytes = self.memory.numpy().data
        self.work: dist.Work


class SmallReduces:
    """In-place reductions of at most `SMALL_BYTES` over at most `SMALL_GROUP` ranks, or of `PAIR_BYTES` over two.

    `number` is that of the group. Receives are posted ahead for each of the two sizes that has been used.
    """

    def __init__(self, directed: DirectedGroups, ranks: Sequence[int], number: int) -> None:
        self._directed, self._rank, self._tag = directed, directed.upwards.rank(), EXCHANGE_TAGS + 2 * number
        self.index, self.others = ranks.index(self._rank), [rank for rank in ranks if rank != self._rank]
        self._most = PAIR_BYTES if len(ranks) == 2 else SMALL_BYTES
        self._ahead: defaultdict[tuple[int, int], deque[_Posted]] = defaultdict(deque)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is reduced here; the same on all members."""
        return 0 < tensor.nbytes <= self._most and not tensor.is_complex()

    def begin(self, tensor: Tensor, op: ReduceOp, **_: object) -> _Exchange:
        """Send the tensor to all others; all members begin the same reductions in the same order."""
        return _Exchange(self, tensor, op)

    def send(self, tensor: Tensor, rank: int, size: int) -> dist.Work:
        """Send a tensor to another member, which receives up to `size` bytes."""
        return self._directed.between(self._rank, rank).send([tensor], rank, self._tag + (size == PAIR_BYTES))

    def take_posted(self, rank: int, size: int) -> _Posted:
        """Return the earliest receive from a member that is not taken, posted now if there is none."""
        if not self._ahead[rank, size]:
            self.post(rank, size, _Posted(size))
        return self._ahead[rank, size].popleft()

    def post(self, rank: int, size: int, receive: _Posted) -> None:
        """Post a receive of the next message of a member, unless one is in flight."""
        if not self._ahead[rank, size]:
            lane, tag = self._directed.between(rank, self._rank), self._tag + (size == PAIR_BYTES)
            receive.work = lane.recv([receive.memory], rank, tag)
            self._ahead[rank, size].append(receive)


class _Exchange:
    """One reduction that has begun."""

    __slots__ = ("_op", "_received", "_reduces", "_sent", "_size", "_tensor")

    def __init__(self, reduces: SmallReduces, tensor: Tensor, op: ReduceOp) -> None:
        self._reduces, self._tensor, self._op = reduces, tensor, op
        self._size = SMALL_BYTES if tensor.nbytes <= SMALL_BYTES else PAIR_BYTES
        self._received = [reduces.take_posted(rank, self._size) for rank in reduces.others]
        self._sent = [reduces.send(tensor, rank, self._size) for rank in reduces.others]

    def wait(self) -> None:
        """Wait until all tensors have come and gone, then combine them and post the next receives."""
        tensor, reduces = self._tensor, self._reduces
        for receive in self._received:
            receive.work.wait()
        for sent in self._sent:
            sent.wait()
        rows, nbytes = [], tensor.nbytes
        for receive in self._received:
            if receive.bytes[nbytes : nbytes + len(_WIPED)] != _WIPED:
                raise MisfitError(f"another rank begins a reduction of more than the {nbytes} bytes of this rank")
            rows.append(receive.memory[:nbytes].view(tensor.dtype).view(tensor.shape))
        rows.insert(reduces.index, tensor)
        combined, *others = rows
        for row in others:
            combined = _COMBINED[self._op](combined, row)
        tensor.copy_(combined)
        for rank, receive in zip(reduces.others, self._received, strict=True):
            receive.memory[:nbytes].fill_(0xFF)
            reduces.post(rank, self._size, receive)
