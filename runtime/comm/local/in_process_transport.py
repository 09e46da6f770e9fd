"""Transport with all ranks in one process, a thread each, for tests and debugging.

    rank 0 ─ send ─▶ message k of (0, 1, tag) ◀─ recv ─ rank 1
       └───▶ collective k of the group: the last member to join computes it ◀───┘

The world's rules define when a send completes, and whether tags matter: "mailbox" is the most lenient, "nccl" as strict
as NCCL, so that a hang or corruption there is an error here, with its reason.

`EchoGroup` is a group of one member that runs as if there were others, for shapes and calls without their numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TypeVar

import torch
from torch import Tensor

from quintsched.check_call_arguments import COUNT, FUNCTION, NUMBER, TEXT, takes
from quintsched.errors import MisfitError, counted

from ...settings.allowed_setting_values import Rules
from ...watch.position_in_shared_memory import NOTHING, WaitCell
from ...watch.rendezvous.rendezvous_store import StartAttempt
from ..checked.message_frame import Label
from ..host_copies import HostLink, TimedLink
from ..transport_interface import DoneWork, Group, ReduceOp, SelfGroup, Transport, Work
from .collectives_by_nccl_rules import Distribute, MemberCall
from .messages_by_nccl_rules import WireTimes
from .rank_threads_and_deadlocks import Awaited, LocalWorld

Result = TypeVar("Result")

_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


class LocalTransport(Transport):
    """One rank of a LocalWorld; `attempt` is set for a process that may be restarted."""

    name = "local"
    attempt: StartAttempt | None = None

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, world.device)
        self.profile = "channel" if world.rules == "nccl" else "tagged"
        self._world = world
        self._wire = world.wire
        self._copies = world.rules != "nccl"
        self._num_groups = 0

    def begin_run(self) -> None:
        """Record that the run has begun, where its process may be restarted."""
        if self.attempt is not None:
            self.attempt.record_begin()

    def _make_group(self, partition: Sequence[tuple[int, ...]]) -> Group:
        call, self._num_groups = self._num_groups, self._num_groups + 1
        self._world.agree(self.rank, call, list(partition))
        ranks = next(ranks for ranks in partition if self.rank in ranks)
        if len(ranks) == 1:
            return SelfGroup(self.rank, self.device)
        return LocalGroup(self._world, call, ranks, self.rank)

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        """Do nothing: channels are created on first use."""

    def _send(self, tensor: Tensor, peer: int, tag: int, label: Label) -> Work:
        payload = tensor.clone() if self._copies else tensor
        with self._world.lock:
            message = self._wire.send(self.rank, peer, tag, payload, (label, self.stamp.step))
            self._world.wake(peer)
        return DoneWork() if self._wire.is_buffered else _LocalWork(self._world, self.rank, message, None, NOTHING)

    def _recv(self, buffer: Tensor, peer: int, tag: int, label: Label) -> Work:
        with self._world.lock:
            message = self._wire.receive(peer, self.rank, tag, buffer, (label, self.stamp.step))
            self._world.wake(peer)
        return _LocalWork(self._world, self.rank, message, None, NOTHING)

    def host_link(self) -> HostLink:
        """Return a link of the world's speed, if it has one."""
        bandwidth = self._world.host_bandwidth
        return super().host_link() if bandwidth is None else TimedLink(bandwidth)

    def abort(self, error: BaseException) -> None:
        """Wake all ranks with a StallError that names this one."""
        self._world.abort(self.rank, error)

    def close(self) -> None:
        """Signal to waiting ranks that this rank has ended."""
        self._world.close(self.rank)


class LocalGroup(Group):
    """A group of a LocalWorld; `call` distinguishes groups of the same ranks."""

    def __init__(self, world: LocalWorld, call: int, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks, ranks.index(rank), world.device)
        self._world = world
        self._key = (call, ranks)
        self._rank = rank
        with world.lock:
            world.meetings.enter(rank, self._key)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return self._meet(MemberCall("all_reduce", op, tensor), tensor, partial(_reduced, _COMBINE[op]))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        collective = MemberCall("all_gather", None, tensor)
        return self._meet(collective, output, lambda brought: [torch.cat(_tensors(brought))] * len(brought))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        collective = MemberCall("reduce_scatter", None, tensor)
        return self._meet(collective, output, lambda brought: reduce(torch.add, _tensors(brought)).chunk(len(brought)))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work:
        equal = (tensor.shape[0] // self.size,) * self.size
        collective = MemberCall("all_to_all", None, tensor, tuple(received or equal), tuple(sent or equal))
        return self._meet(collective, output, _swap)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        collective = MemberCall("broadcast from member", source, tensor)
        return self._meet(collective, tensor, lambda brought: [brought[source].tensor] * len(brought))

    def _meet(self, collective: MemberCall, output: Tensor, distribute: Distribute) -> Work:
        with self._world.lock:
            meeting, held = self._world.meetings.join(self._rank, self._key, collective, output, distribute)
            for other in held:
                self._world.wake_all(other.group[1])
        return _LocalWork(self._world, self._rank, meeting, self.wait_cell, self.wait_code)


def _reduced(combine: Callable[[Tensor, Tensor], Tensor], brought: list[MemberCall]) -> list[Tensor]:
    total = brought[0].tensor
    for collective in brought[1:]:
        total = combine(total, collective.tensor)
    return [total] * len(brought)


def _tensors(brought: list[MemberCall]) -> list[Tensor]:
    return [collective.tensor for collective in brought]


def _swap(brought: list[MemberCall]) -> list[Tensor]:
    """Return the rows that each member receives in an all-to-all.

    Raises `MisfitError` where one member sends a number of rows that another one does not expect.
    """
    for source, sender in enumerate(brought):
        for target, receiver in enumerate(brought):
            if sender.sent[target] != receiver.received[source]:
                raise MisfitError(
                    f"all_to_all: member {source} sends {counted(sender.sent[target], 'row')} to member {target}, "
                    f"which expects {receiver.received[source]}"
                )
    rows = [collective.tensor.split(collective.sent) for collective in brought]
    return [torch.cat(mine) for mine in zip(*rows, strict=True)]


class _LocalWork:
    """Wait for a message or a meeting, as a Work; `cell` publishes the wait, None for a message: its taker does."""

    __slots__ = ("_awaited", "_cell", "_code", "_rank", "_world")

    def __init__(self, world: LocalWorld, rank: int, awaited: Awaited, cell: WaitCell | None, code: int) -> None:
        self._world = world
        self._rank = rank
        self._awaited: Awaited | None = awaited
        self._cell, self._code = cell, code

    def wait(self) -> None:
        if self._awaited is None:
            return
        cell = self._cell
        if cell is not None:
            cell.memory[cell.at] = self._code
        self._world.wait_for(self._rank, self._awaited)
        if cell is not None:
            cell.memory[cell.at] = NOTHING
        self._awaited = None


@takes("run_local(4, function)", world_size=COUNT, fn=FUNCTION, timeout_s=NUMBER, rules=TEXT)
def run_local(
    world_size: int,
    fn: Callable[[Transport], Result],
    timeout_s: float = 60.0,
    *,
    rules: Rules = "mailbox",
    wire_s: WireTimes = 0.0,
    collective_s: float = 0.0,
    host_bandwidth: float | None = None,
) -> list[Result]:
    """Call `fn(transport)` on `world_size` ranks, a thread each, and return the results in rank order.

    `rules` are the semantics of messages: "rendezvous" and "nccl" reveal deadlocks of such transports. A message takes
    `wire_s`, one number or one for each channel {(source, destination): seconds}, and a channel carries one at a time.
    A collective takes `collective_s`; a group runs one at a time. Activations are offloaded to host memory, and
    fetched, at `host_bandwidth` bytes per second; None: as fast as they are copied.

    If one raises, all others are woken with a StallError, and the first error is raised here with its rank in a note.
    The threads inherit the caller's grad mode; they share torch's global random generator.
    """
    world = LocalWorld(
        world_size,
        timeout_s=timeout_s,
        rules=rules,
        wire_s=wire_s,
        collective_s=collective_s,
        host_bandwidth=host_bandwidth,
    )
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
    for thread in threads:  # a rank's function may continue after `Engine.close`, which ends the rank
        thread.join(timeout_s if world.failure else None)
    if world.failure is None:
        return [results[rank] for rank in range(world_size)]
    rank, error = world.failure
    error.add_note(f"on rank {rank} of {world_size}")
    raise error


class EchoGroup(SelfGroup):
    """A group without its other members: its own tensors replace theirs, and a sum is its own part alone."""

    def __init__(self, size: int, device: torch.device) -> None:
        Group.__init__(self, tuple(range(size)), 0, device)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.view(self.size, *tensor.shape).copy_(tensor)
        return DoneWork()

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor.view(self.size, *output.shape)[0])
        return DoneWork()
