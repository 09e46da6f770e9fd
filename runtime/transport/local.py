"""All ranks in one process, a thread each: the transport for tests and debugging.

    rank 0 ─ send ─▶ mailbox (0, 1, tag) ─ recv ─▶ rank 1
       └─── k-th collective ──▶ meeting k of the group ◀───┘

The tensor is copied when it is sent, so a sender never waits; the k-th receive of a mailbox gets its k-th
message. Members of a group leave what they bring at a meeting and combine it in the order of ranks when they
wait, so that results are bitwise the same on all ranks and from run to run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from .base import DoneWork, Group, ReduceOp, SelfGroup, Transport, Work, describe
from .local_world import LocalWorld, Meeting

Result = TypeVar("Result")


class LocalTransport(Transport):
    """One rank of a LocalWorld."""

    name = "local"
    profile = "tagged"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, world.device)
        self._world = world
        self._num_groups = 0

    def _make_group(self, partition: Sequence[tuple[int, ...]]) -> Group:
        call, self._num_groups = self._num_groups, self._num_groups + 1
        self._world.agree(self.rank, call, list(partition))
        ranks = next(ranks for ranks in partition if self.rank in ranks)
        if len(ranks) == 1:
            return SelfGroup(self.rank, self.device)
        return LocalGroup(self._world, call, ranks, self.rank)

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        """Mailboxes appear when they are used."""

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        message = tensor.clone()
        with self._world.changed:
            box = self._world.mailboxes[self.rank, peer, tag]
            number, box.sent = box.sent, box.sent + 1
            box.messages[number] = message
            self._world.changed.notify_all()
        if not self._world.rendezvous:
            return DoneWork()
        what = f"rank {peer} to receive message {number} with tag {tag}, {describe(tensor)}"

        def meet() -> None:
            with self._world.changed:
                self._world.wait_until(self.rank, lambda: number < box.expected, what)

        return _LocalWork(meet)

    def _recv(self, buffer: Tensor, peer: int, tag: int) -> Work:
        with self._world.changed:
            box = self._world.mailboxes[peer, self.rank, tag]
            number, box.expected = box.expected, box.expected + 1
            self._world.changed.notify_all()
        what = f"message {number} from rank {peer} with tag {tag}, {describe(buffer)}"

        def deliver() -> None:
            with self._world.changed:
                self._world.wait_until(self.rank, lambda: number in box.messages, what)
                message = box.messages.pop(number)
            if describe(message) != describe(buffer):
                raise MisfitError(f"rank {self.rank} expected {what}, but it is {describe(message)}")
            buffer.copy_(message)

        return _LocalWork(deliver)

    def abort(self, error: BaseException) -> None:
        """Wake all ranks with a StallError that names this one."""
        self._world.abort(self.rank, error)

    def close(self) -> None:
        """Tell those who wait for this rank that it has ended."""
        self._world.close(self.rank)


class LocalGroup(Group):
    """A group of a LocalWorld; `call` tells apart the groups of the same ranks."""

    def __init__(self, world: LocalWorld, call: int, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks, ranks.index(rank), world.device)
        self._world = world
        self._call = call
        self._rank = rank
        self._num_meetings = 0

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._meet(f"all_reduce {op.value}", tensor, tensor, lambda meeting: meeting.combined, op)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._meet("all_gather", tensor, output, lambda meeting: torch.cat(meeting.in_order))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._meet(
            "reduce_scatter", tensor, output, lambda meeting: meeting.combined.chunk(self.size)[self.index]
        )

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._meet(f"broadcast from {source}", tensor, tensor, lambda meeting: meeting.in_order[source])

    def _meet(
        self,
        kind: str,
        tensor: Tensor,
        output: Tensor,
        take: Callable[[Meeting], Tensor],
        op: ReduceOp = ReduceOp.SUM,
    ) -> Work:
        """Leave `tensor` at the next meeting; the Work copies what `take` makes of the full meeting into `output`."""
        key = (self._call, self.ranks, self._num_meetings)
        self._num_meetings += 1
        signature = f"{kind} {describe(tensor)}"
        what = f"{signature} with ranks {list(self.ranks)}, collective {key[2]} of the group"
        meeting = self._join(key, Meeting(self.ranks, signature, op), tensor)

        def finish() -> None:
            with self._world.changed:
                self._world.wait_until(self._rank, meeting.full, what)
                meeting.taken += 1
                if meeting.taken == self.size:
                    del self._world.meetings[key]
            output.copy_(take(meeting))

        return _LocalWork(finish)

    def _join(self, key: tuple[int, tuple[int, ...], int], fresh: Meeting, tensor: Tensor) -> Meeting:
        mine = tensor.clone()
        with self._world.changed:
            meeting = self._world.meetings.setdefault(key, fresh)
            if meeting.signature != fresh.signature:
                others = f"rank {min(meeting.brought)} issued {meeting.signature}"
                raise MisfitError(f"collective {key[2]}: {others}, rank {self._rank} {fresh.signature}")
            meeting.brought[self._rank] = mine
            self._world.changed.notify_all()
        return meeting


class _LocalWork:
    """Runs `finish` at the first wait."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None


def run_local(
    world_size: int, fn: Callable[[Transport], Result], timeout_s: float = 60.0, *, rendezvous: bool = False
) -> list[Result]:
    """Call `fn(transport)` on `world_size` ranks, a thread each, and return the results in order of ranks.

    With `rendezvous`, a send is done only when its receive is there: for finding out what deadlocks on such a wire.

    If one raises, all others are woken with a StallError, and the first error is raised here with its rank in a note.
    The threads take over the caller's grad mode; torch's global random generator is shared between them.
    """
    world = LocalWorld(world_size, timeout_s=timeout_s, rendezvous=rendezvous)
    results: dict[int, Result] = {}
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        transport = LocalTransport(world, rank)
        try:
            with torch.set_grad_enabled(grad_enabled):
                results[rank] = fn(transport)
        except BaseException as error:
            world.abort(rank, error)
        transport.close()

    threads = [threading.Thread(target=run, args=(r,), name=f"rank{r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    world.wait_for_end()
    if world.failure is None:
        return [results[rank] for rank in range(world_size)]
    for thread in threads:
        thread.join(timeout_s)
    rank, error = world.failure
    error.add_note(f"on rank {rank} of {world_size}")
    raise error
