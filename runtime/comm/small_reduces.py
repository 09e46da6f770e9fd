"""Small all-reduces over gloo: each member sends its tensor to all others, and combines them in the order of ranks.

    rank 0   send ──▶ pair of messages upwards   ──▶ posted since the last reduction   rank 1
             posted since the last reduction ◀── pair of messages downwards ◀── send

gloo's own is a ring of several segments, each way, driven by another thread: two ranks wake each other four times
where one message each way will do.

Each direction has a process group of its own. A gloo pair is locked while a message is posted on it, also while the
system call wakes the peer; meanwhile gloo's own thread, woken by what the peer sends back, polls for that lock, and may
keep the processor from its owner for milliseconds. What comes back on another pair needs another lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quintsched.errors import MisfitError

from .transport_interface import ReduceOp

SMALL_BYTES, SMALL_GROUP = 2048, 4
EXCHANGE_TAG = 2**31 - 1
"""Tag of messages of small all-reduces: no other message of a process group has it."""

_WIPED = b"\xff" * 8
_COMBINED: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


class DirectedGroups(NamedTuple):
    """Process groups of the same ranks, for messages to higher ranks and to lower ones."""

    upwards: dist.ProcessGroup
    downwards: dist.ProcessGroup

    def between(self, source: int, destination: int) -> dist.ProcessGroup:
        """Return the process group of messages from one rank to another."""
        return self.upwards if source < destination else self.downwards


class _Posted:
    """A receive in flight from one member, into memory for the longest tensor; bytes not received to are wiped."""

    __slots__ = ("bytes", "memory", "work")

    def __init__(self) -> None:
        self.memory = torch.empty(SMALL_BYTES + len(_WIPED), dtype=torch.uint8)
        self.bytes = self.memory.numpy().data
        self.bytes[:] = b"\xff" * len(self.bytes)
        self.work: dist.Work


class SmallReduces:
    """Sums, maxima and minima of at most `SMALL_BYTES` over at most `SMALL_GROUP` members, in place."""

    def __init__(self, directed: DirectedGroups) -> None:
        self._directed, self.rank = directed, directed.upwards.rank()
        self.others = [member for member in range(directed.upwards.size()) if member != self.rank]
        self._ahead: dict[int, deque[_Posted]] = {member: deque() for member in self.others}

    def begin(self, tensor: Tensor, op: ReduceOp, **_: object) -> _Exchange:
        """Send the tensor to all others; all members begin the same reductions in the same order."""
        return _Exchange(self, tensor, op)

    def send(self, tensor: Tensor, member: int) -> dist.Work:
        """Send a tensor to a member."""
        return self._directed.between(self.rank, member).send([tensor], member, EXCHANGE_TAG)

    def take_posted(self, member: int) -> _Posted:
        """Return the earliest receive that is not taken, posted now if there is none."""
        if not self._ahead[member]:
            self.post(member, _Posted())
        return self._ahead[member].popleft()

    def post(self, member: int, receive: _Posted) -> None:
        """Post a receive of the next message of a member, unless one is in flight."""
        if not self._ahead[member]:
            receive.work = self._directed.between(member, self.rank).recv([receive.memory], member, EXCHANGE_TAG)
            self._ahead[member].append(receive)


class _Exchange:
    """One reduction that has begun."""

    __slots__ = ("_op", "_received", "_reduces", "_sent", "_tensor")

    def __init__(self, reduces: SmallReduces, tensor: Tensor, op: ReduceOp) -> None:
        self._reduces, self._tensor, self._op = reduces, tensor, op
        self._received = [reduces.take_posted(member) for member in reduces.others]
        self._sent = [reduces.send(tensor, member) for member in reduces.others]

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
        rows.insert(reduces.rank, tensor)
        combined, *others = rows
        for row in others:
            combined = _COMBINED[self._op](combined, row)
        tensor.copy_(combined)
        for member, receive in zip(reduces.others, self._received, strict=True):
            receive.bytes[:nbytes] = _WIPED * (nbytes // 8) + _WIPED[: nbytes % 8]
            reduces.post(member, receive)
