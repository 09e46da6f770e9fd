"""What the interpreter asks of the wires: a transport carries messages, a group does collectives.

    Transport (one per rank)                       Group (one per rank and set of ranks)
      send(tensor, peer, tag)  ──▶ Work              all_reduce, all_gather,
      recv(buffer, peer, tag)  ──▶ Work              reduce_scatter, broadcast  ──▶ Work
      make_group(partition)    ──▶ Group

Nothing here blocks its caller but `Work.wait`. Everything that a real wire would turn into silent garbage is
refused here, for all transports alike: gloo walks straight through the memory of a tensor that is not
contiguous, cuts messages of the wrong size, and matches whatever it finds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ..watch.cell import NOTHING, WaitCell, collective_code
from ..watch.publisher import Publisher
from .checked.frame import NO_LABEL, Label, Stamp, describe_spec
from .host_link import HostLink, host_link


class ReduceOp(Enum):
    """How a reduction combines the ranks' tensors."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


class Work(Protocol):
    """Something under way. Keep it, and wait for it before its tensor is read, changed or dropped."""

    def wait(self) -> None:
        """Return when the result may be used: waits on the host, or on NCCL makes the current stream wait.

        Raises:
            StallError: a peer died, or nothing came within the timeout.
            MisfitError: what came does not fit (only where the transport can tell: local).
        """


class DoneWork:
    """Work that was finished when it was issued."""

    def wait(self) -> None:
        """Return at once."""


class _NotedWork:
    """Work among the members of a group, which says that it is waited for."""

    __slots__ = ("_group", "_work")

    def __init__(self, work: Work, group: Group) -> None:
        self._work, self._group = work, group

    def wait(self) -> None:
        cell = self._group.wait_cell
        cell.memory[cell.at] = self._group.wait_code
        self._work.wait()
        cell.memory[cell.at] = NOTHING


class Group(ABC):
    """Ranks that do collectives together, each of them issuing the same ones in the same order.

    Collectives are asynchronous: several may be outstanding, and their tensors belong to the group until
    waited for. All raise MisfitError at once for tensors that do not fit each other.

    Attributes:
        ranks, size: the members, as global ranks in ascending order, and how many these are.
        index: the caller's place among them.
        device: where their tensors live.
        wait_cell, wait_code: where a wait for its collectives is written down, and as which number.
    """

    def __init__(self, ranks: tuple[int, ...], index: int, device: torch.device) -> None:
        self.ranks, self.size = ranks, len(ranks)
        self.index = index
        self.device = device
        self.wait_cell, self.wait_code = WaitCell(), NOTHING

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Combine `tensor` over the members, in place; the result is bitwise the same on all of them."""
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

        `output` may be this member's shard of `tensor`, in place; what the rest of it holds then is not said.
        """
        self._require_multiple("reduce_scatter", tensor, output)
        return self._reduce_scatter(_data(output), _data(tensor))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Work:
        """Give rows of `tensor` (rows, …) to each member, in their order; `output` gets rows from each, in that order.

        `sent` and `received` are how many, the same on both ends; equally many where neither is given, by all members
        alike.
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
        """Return the work of a message between members as something that other work of the rank may run beside."""
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
        """Whether `shard` (n, …) is, in place, this member's of `whole` (size × n, …)."""
        return shard.data_ptr() == whole.chunk(self.size)[self.index].data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """A group is a handle: a copied module goes on talking to the same ranks."""
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
    """A group of one: every collective is done at once."""

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
    """One rank's end of the wires.

    Attributes:
        name: "local", "gloo" or "nccl".
        profile: the transport profile (`graph.profiles`) that a plan must be proved for: "tagged" where messages
            are matched by name, "channel" where the rules are NCCL's and the order of a directed channel is all.
        rank: mine.
        world_size: how many ranks there are.
        device: where tensors that are sent and received live.
        waits: says what the rank waits for; `groups` are the ranks of its groups by their numbers there.
        blocks_host: whether the host stands still in a wait.
        publisher: says where the rank is.
        stamp: which step, or evaluation, messages belong to that are posted now.
        checks_everything: whether messages get checksums, and collectives of groups are compared; on all ranks.
        goes_on: whether an earlier attempt had begun this run, after which its ranks were started again.
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
        self.publisher.follow(self.waits)
        self.groups: list[tuple[int, ...]] = []

    def world_group(self) -> Group:
        """Return the group of all ranks, for what they say between steps; made by the first call, on all of them."""
        if self._world_group is None:
            self._world_group = self.make_group([tuple(range(self.world_size))])
        return self._world_group

    def check_everything(self, checks: bool) -> None:
        """Give messages checksums from now on, and compare collectives, or do not; all ranks call this."""
        self.checks_everything = checks

    def begin_run(self) -> None:
        """Note that the run has begun: if its ranks are started again, they go on with it. Rank 0 calls this."""
        return  # where nothing would start them again

    def make_group(self, partition: Sequence[tuple[int, ...]]) -> Group:
        """Split the world into groups and return the caller's.

        Every rank calls this in the same order with the same list of disjoint, ascending rank tuples that cover
        the world.

        Raises:
            MisfitError: the tuples are no partition of the world.
            StallError: a member did not come.
        """
        if sorted(r for ranks in partition for r in ranks) != list(range(self.world_size)):
            raise MisfitError(f"{list(partition)} does not name each of the {self.world_size} ranks once")
        if any(list(ranks) != sorted(ranks) for ranks in partition):
            raise MisfitError(f"ranks of a group must be ascending: {list(partition)}")
        group = self._make_group(partition)
        group.wait_cell, group.wait_code = self.waits, collective_code(len(self.groups))
        self.groups.append(group.ranks)
        self.publisher.tell_group(group.ranks)
        return group

    def open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        """Make the directed (source, destination) channels up front, in ascending order.

        Every rank calls this with the same list, once, before the first message.

        Raises:
            MisfitError: a channel to itself or out of the world.
            StallError: a peer did not come.
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
            tag: a small number that the receiver names too (NCCL ignores it: there, order is identity).

        Raises:
            MisfitError: no such channel, wrong device, or not contiguous.
        """
        self._require_ready(tensor, (self.rank, peer))
        return self._send(_data(tensor), peer, tag, NO_LABEL)

    def recv(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Receive from rank `peer` into a contiguous `buffer`, as `send` does; a tag is first in, first out."""
        self._require_ready(buffer, (peer, self.rank))
        return self._recv(_data(buffer), peer, tag, NO_LABEL)

    def send_in_place(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send as `send` does, without a copy on the way, to `recv_in_place`."""
        return self.send(tensor, peer, tag)

    def recv_in_place(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Receive what `send_in_place` has sent."""
        return self.recv(buffer, peer, tag)

    def sender(self, peer: int, tag: int, label: Label = NO_LABEL) -> Callable[[Tensor], Work]:
        """Return what sends to a rank under a tag, for who sees to it that tensors are contiguous and on the device.

        `label` says what for; the receiver has to expect the same. Raises `MisfitError` where there is no such channel.
        """
        self._require_channel((self.rank, peer))
        return self._sender(peer, tag, label)

    def receiver(
        self, buffer: Tensor, peer: int, tag: int, label: Label = NO_LABEL, room: Tensor | None = None
    ) -> Callable[[], Work]:
        """Return what receives from a rank into a buffer, which `room` goes on behind; raises as `recv` does, now."""
        self._require_ready(buffer, (peer, self.rank))
        return self._receiver(buffer, peer, tag, label, room)

    def room_for(self, nbytes: int) -> int:
        """Return how many bytes behind a buffer spare a message a copy; 0 where it is not copied anyway."""
        return 0

    def _sender(self, peer: int, tag: int, label: Label) -> Callable[[Tensor], Work]:
        return partial(self._send, peer=peer, tag=tag, label=label)

    def _receiver(self, buffer: Tensor, peer: int, tag: int, label: Label, room: Tensor | None) -> Callable[[], Work]:
        return partial(self._recv, buffer, peer, tag, label)

    def host_link(self) -> HostLink:
        """Return the link between the memory of this rank's device and its host's."""
        return host_link(self.device)

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Give up because of `error`: the other ranks stop waiting as soon as they can; only `close` may follow."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. Quiet, quick, and allowed twice, even when peers are dead."""

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
    """Say dtype and shape in a few letters, as error messages do: "float32 (2, 3)"."""
    return describe_spec(tensor.dtype, tensor.shape)


def _data(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, which a message has no business keeping."""
    return tensor.detach() if tensor.requires_grad else tensor
