"""Interface of communication: a transport sends point-to-point messages, a group runs collectives.

    Transport (one per rank)                       Group (one per rank and set of ranks)
      send(tensor, peer, tag)  ──▶ Work              all_reduce, all_gather,
      recv(buffer, peer, tag)  ──▶ Work              reduce_scatter, broadcast  ──▶ Work
      make_group(partition)    ──▶ Group

Only `Work.wait` blocks the caller. Misuse that a real wire would turn into silent corruption raises here, for all
transports alike: gloo reads past a non-contiguous tensor's elements, truncates messages of the wrong size, and matches
any two messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from quintsched.errors import MisfitError, counted

from ..watch.position_in_shared_memory import NOTHING, WaitCell, collective_code
from ..watch.position_publisher import Publisher
from .checked.message_frame import NO_LABEL, Label, Stamp, describe_spec
from .host_copies import HostLink, host_link


class ReduceOp(Enum):
    """Operation of a reduction over the ranks' tensors."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Work(Protocol):
    """A pending operation. Keep it, and wait for it before its tensor is read, changed or dropped."""

    def wait(self) -> None:
        """Return when the result may be used: waits on the host; with NCCL the current stream waits instead.

        Raises:
            StallError: a peer died, or did not answer within the timeout.
            MisfitError: the received message does not match (only where the transport can tell: local).
        """


class DoneWork:
    """Work that was complete when it was issued."""

    def wait(self) -> None:
        """Return at once."""


class _NotedWork:
    """Work of a group's members that publishes in the wait cell when it is waited for."""

    __slots__ = ("_group", "_work")

    def __init__(self, work: Work, group: Group) -> None:
        self._work, self._group = work, group

    def wait(self) -> None:
        cell = self._group.wait_cell
        cell.memory[cell.at] = self._group.wait_code
        self._work.wait()
        cell.memory[cell.at] = NOTHING


class Group(ABC):
    """A process group: ranks that run collectives together, all of them issuing the same ones in the same order.

    Collectives are asynchronous: several may be pending, and their tensors must not be used until they are waited for.
    All raise MisfitError at once for tensors that do not match each other.

    Attributes:
        ranks, size: the members, as global ranks in ascending order, and their number.
        index: the caller's process-group rank.
        device: the device of their tensors.
        wait_cell, wait_code: the cell that publishes a wait for its collectives, and the number written there.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, device: torch.device) -> None:
        self.ranks, self.size = ranks, len(ranks)
        self.index = index
        self.device = device
        self.wait_cell, self.wait_code = WaitCell(), NOTHING

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """All-reduce `tensor` over the members, in place; the result is bitwise the same on all of them."""
        if not tensor.is_contiguous() or tensor.requires_grad:
            self._require_contiguous(tensor)
            tensor = tensor.detach()
        return self._all_reduce(tensor, op)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Fill `output` (size × n, …) with the members' `tensor` (n, …), in the order of `ranks`."""
        self._require_multiple("all_gather", output, tensor)
        return self._all_gather(_data(output), _data(tensor))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        """Sum `tensor` (size × n, …) over the members; `output` (n, …) gets this member's shard of the sum.

        `output` may be this member's shard of `tensor`, in place; the rest of `tensor` is undefined afterwards.
        """
        self._require_multiple("reduce_scatter", tensor, output)
        return self._reduce_scatter(_data(output), _data(tensor))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Work:
        """Send rows of `tensor` (rows, …) to each member, in their order; `output` gets rows from each, in that order.

        `sent` and `received` are the row counts per member, equal on both ends; if both are left out, by all members
        alike, rows are divided equally.
        """
        self._require_contiguous(output, tensor)
        alike = tensor.dim() > 0 and output.shape[1:] == tensor.shape[1:] and output.dtype == tensor.dtype
        if received is None or sent is None:
            fits = alike and output.shape == tensor.shape and tensor.shape[0] % self.size == 0
            if not fits or received is not sent:
                how = f"all_to_all between {describe(tensor)} and {describe(output)}"
                self._refuse(f"{how}: wants rows that divide by {self.size}, or how many are received and sent")
        elif not alike or not self._add_up(output, received) or not self._add_up(tensor, sent):
            how = f"all_to_all between {describe(tensor)} and {describe(output)}"
            self._refuse(f"{how}: does not fit {[*sent]} rows sent and {[*received]} received")
        return self._all_to_all(_data(output), _data(tensor), received, sent)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Overwrite `tensor` with that of the member at index `source` of this group."""
        if not tensor.is_contiguous() or tensor.requires_grad:
            self._require_contiguous(tensor)
            tensor = tensor.detach()
        if not 0 <= source < self.size:
            self._refuse(f"broadcast from member {source}, but there are {self.size}")
        return self._broadcast(tensor, source)

    def beside(self, work: Work) -> Work:
        """Return the work of a message between members in a form that other work of the rank may overlap with."""
        return _NotedWork(work, self)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work: ...

    @abstractmethod
    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work: ...

    @abstractmethod
    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Work: ...

    def is_shard_in_place(self, shard: Tensor, whole: Tensor) -> bool:
        """Whether `shard` (n, …) is a view of this member's part of `whole` (size × n, …)."""
        return shard.data_ptr() == whole.chunk(self.size)[self.index].data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Return self, as a group is a handle: a copied module communicates with the same ranks."""
        return self

    def _add_up(self, tensor: Tensor, rows: Sequence[int]) -> bool:
        return len(rows) == self.size and min(rows) >= 0 and sum(rows) == tensor.shape[0]

    def _require_contiguous(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous():
                self._refuse(f"{describe(tensor)} is not contiguous; pass .contiguous()")

    def _require_multiple(self, name: str, whole: Tensor, shard: Tensor) -> None:
        self._require_contiguous(whole, shard)
        fits = shard.dim() > 0 and whole.shape == (self.size * shard.shape[0], *shard.shape[1:])
        if not fits or whole.dtype != shard.dtype:
            self._refuse(f"{name} between {describe(whole)} and {describe(shard)}: wants {self.size} times the rows")

    def _refuse(self, problem: str) -> NoReturn:
        raise MisfitError(f"group of ranks {list(self.ranks)}: {problem}")


class SelfGroup(Group):
    """A group of one rank: every collective completes at once."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__((rank,), 0, device)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        return DoneWork()

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor)
        return DoneWork()

    _reduce_scatter = _all_gather

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work:
        output.copy_(tensor)
        return DoneWork()

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return DoneWork()


class Transport(ABC):
    """Transport of one rank: point-to-point messages, and groups.

    Attributes:
        name: "local", "gloo" or "nccl".
        profile: the profile (`graph.transport_ordering_rules`) that a plan must be proved for: "tagged" where
            messages are matched by name, "channel" where the rules are NCCL's: the order of a directed channel is all.
        rank: this rank.
        world_size: number of ranks.
        device: the device of tensors that are sent and received.
        waits: publishes the wait of this rank; `groups` are the ranks of its groups by their numbers there.
        blocks_host: whether a wait blocks the host.
        publisher: publishes the position of this rank in its program.
        stamp: the step, or evaluation, of messages that are posted now.
        checks_everything: whether messages have checksums, and collectives of groups are compared; on all ranks.
        goes_on: whether this run was begun by an earlier attempt, and its ranks were restarted.
    """

    name: str
    profile: str
    blocks_host, goes_on = True, False

    def __init__(self, rank: int, world_size: int, device: torch.device, publisher: Publisher | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._device_type = device.type
        self._channels: set[tuple[int, int]] = set()
        self._world_group: Group | None = None
        self.stamp = Stamp()
        self.checks_everything = False
        self.waits = WaitCell()
        self.publisher = publisher or Publisher()
        self.publisher.follow_waits(self.waits)
        self.groups: list[tuple[int, ...]] = []

    def world_group(self) -> Group:
        """Return the group of all ranks, for exchanges between steps; created by the first call, on all ranks."""
        if self._world_group is None:
            self._world_group = self.make_group([tuple(range(self.world_size))])
        return self._world_group

    def check_everything(self, checks: bool) -> None:
        """Switch checksums of messages and comparison of collectives on or off; all ranks call this."""
        self.checks_everything = checks

    def begin_run(self) -> None:
        """Record that the run has begun: restarted ranks resume it. Rank 0 calls this."""
        return  # no restarts by default

    def make_group(self, partition: Sequence[tuple[int, ...]]) -> Group:
        """Split the world into groups and return the caller's (collective).

        Every rank calls this in the same order with the same list of disjoint, ascending rank tuples that cover the
        world.

        Raises:
            MisfitError: the tuples are no partition of the world.
            StallError: a member did not join.
        """
        if sorted(r for ranks in partition for r in ranks) != list(range(self.world_size)):
            raise MisfitError(f"{list(partition)} does not name each of the {counted(self.world_size, 'rank')} once")
        if any(list(ranks) != sorted(ranks) for ranks in partition):
            raise MisfitError(f"ranks of a group must be ascending: {list(partition)}")
        group = self._make_group(partition)
        group.wait_cell, group.wait_code = self.waits, collective_code(len(self.groups))
        self.groups.append(group.ranks)
        self.publisher.tell_group(group.ranks)
        return group

    def open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        """Create the directed (source, destination) channels up front, in ascending order.

        Every rank calls this with the same list, once, before the first message.

        Raises:
            MisfitError: a channel to the same rank, or outside the world.
            StallError: a peer did not join.
        """
        world = range(self.world_size)
        for source, destination in channels:
            if source == destination or source not in world or destination not in world:
                raise MisfitError(f"no channel from rank {source} to rank {destination} in a world of {len(world)}")
        fresh = sorted(set(channels) - self._channels)
        self._channels.update(fresh)
        self._open_channels(fresh)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send a contiguous `tensor` to rank `peer`.

        Args:
            tensor: of any shape; must not change until the Work was waited for, but may be sent again meanwhile.
            peer: the destination, a global rank.
            tag: a small number that the receiver names too (NCCL ignores it and matches by order).

        Raises:
            MisfitError: no such channel, wrong device, or not contiguous.
        """
        self._require_ready(tensor, (self.rank, peer))
        return self._send(_data(tensor), peer, tag, NO_LABEL)

    def recv(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Receive from rank `peer` into a contiguous `buffer`, as `send` does; messages of one tag arrive in order."""
        self._require_ready(buffer, (peer, self.rank))
        return self._recv(_data(buffer), peer, tag, NO_LABEL)

    def send_in_place(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send as `send` does, without an intermediate copy; matches `recv_in_place`."""
        return self.send(tensor, peer, tag)

    def recv_in_place(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Receive a message of `send_in_place`."""
        return self.recv(buffer, peer, tag)

    def sender(self, peer: int, tag: int, label: Label = NO_LABEL) -> Callable[[Tensor], Work]:
        """Return a function that sends to a rank under a tag; its tensors must be contiguous and on the device.

        `label` identifies the message, as on the receiver. Raises `MisfitError` where there is no such channel.
        """
        self._require_channel((self.rank, peer))
        return self._sender(peer, tag, label)

    def receiver(
        self, buffer: Tensor, peer: int, tag: int, label: Label = NO_LABEL, room: Tensor | None = None
    ) -> Callable[[], Work]:
        """Return a function that receives into a buffer, `room` being its memory and a frame; raises as `recv`, now."""
        self._require_ready(buffer, (peer, self.rank))
        return self._receiver(buffer, peer, tag, label, room)

    def room_for(self, nbytes: int) -> int:
        """Return the bytes behind a buffer that save the transport a copy of a message; 0 where it makes none."""
        return 0

    def _sender(self, peer: int, tag: int, label: Label) -> Callable[[Tensor], Work]:
        return partial(self._send, peer=peer, tag=tag, label=label)

    def _receiver(self, buffer: Tensor, peer: int, tag: int, label: Label, room: Tensor | None) -> Callable[[], Work]:
        return partial(self._recv, buffer, peer, tag, label)

    def host_link(self) -> HostLink:
        """Return the link that copies between this rank's device and its host."""
        return host_link(self.device)

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Abort because of `error`: the other ranks stop waiting as soon as they can; only `close` may follow."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. Silent, fast, and allowed twice, even when peers are dead."""

    @abstractmethod
    def _make_group(self, partition: Sequence[tuple[int, ...]]) -> Group: ...

    @abstractmethod
    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _send(self, tensor: Tensor, peer: int, tag: int, label: Label) -> Work: ...

    @abstractmethod
    def _recv(self, buffer: Tensor, peer: int, tag: int, label: Label) -> Work: ...

    def _require_ready(self, tensor: Tensor, channel: tuple[int, int]) -> None:
        if channel in self._channels and tensor.device.type == self._device_type and tensor.is_contiguous():
            return
        self._require_channel(channel)
        where = f"rank {self.rank}, channel {channel[0]} to {channel[1]}"
        if tensor.device.type != self._device_type:
            raise MisfitError(f"{where}: {describe(tensor)} is on {tensor.device}, the transport is on {self.device}")
        raise MisfitError(f"{where}: {describe(tensor)} is not contiguous; pass .contiguous()")

    def _require_channel(self, channel: tuple[int, int]) -> None:
        if channel not in self._channels:
            where = f"rank {self.rank}, channel {channel[0]} to {channel[1]}"
            raise MisfitError(f"{where} was never opened; name it in open_channels")


def describe(tensor: Tensor) -> str:
    """Return dtype and shape in short, for error messages: "float32 (2, 3)"."""
    return describe_spec(tensor.dtype, tensor.shape)


def _data(tensor: Tensor) -> Tensor:
    """Return the tensor without its autograd graph, so that a message does not keep the graph alive."""
    return tensor.detach() if tensor.requires_grad else tensor
