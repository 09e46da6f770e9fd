"""Gloo and NCCL transports, over torch.distributed.

    gloo             messages: a process group each way, matched by tag               collectives: a process group each
    gloo, as nccl    the same without tags: a directed channel delivers in order
    nccl             messages: one process group (communicator, stream) per channel   collectives: a process group each

Process groups are created by plain `new_group`, called by every rank for every group, members or not. That costs a
non-member 8 µs and no message, and the groups get the same names everywhere. The option
`use_local_synchronization` must not be used here: it derives the name from the number of groups that the rank has
created so far (up to torch 2.13, see pytorch#189073), so rank 1 of a pipeline 0-1-2, already in a channel with rank 0,
would wait for rank 2 under another name for ever.

NCCL creates a communicator at the first operation on a process group, and blocks its caller. So each group runs one
operation as soon as it is created, in the order that all ranks share; none is created later, during a step.
"""

from __future__ import annotations

import atexit
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from quintsched.check_call_arguments import NUMBER, PLAN, TEXT, takes
from quintsched.errors import MisfitError, UsageError, suggest
from quintsched.plan import Plan

from ..settings.allowed_setting_values import Rules
from ..watch.connect_to_monitor import WatchOptions, find_watch, start_watch
from ..watch.position_publisher import Publisher
from ..watch.rendezvous.network_addresses import choose_interfaces, require_interfaces
from ..watch.rendezvous.rendezvous_store import HUB, StartAttempt, launchers_keys, meet, open_store, require_addresses
from ..watch.uncaught_error import report_uncaught
from .checked.framed_messages import FramedMessages, FrameKey
from .checked.gloo_small_reduces import SMALL_GROUP, DirectedGroups, SmallReduces
from .checked.message_frame import NO_LABEL, Label, describe_spec
from .device import LIBRARIES, claim_device, library_of, require_queues, synchronize
from .torch_process_groups import TorchGroup, TorchWork, raise_stall, run_bounded, stall_errors
from .transport_interface import Group, SelfGroup, Transport, Work

_CLOSE_TIMEOUT_S = 10.0
BEGIN_WAITS_S = 10.0


@takes('connect("gloo", timeout_s=60)', backend=TEXT, timeout_s=NUMBER, plan=PLAN)
def connect(
    backend: str,
    timeout_s: float = 1800.0,
    *,
    rules: Rules | None = None,
    watch: WatchOptions | None = None,
    plan: Plan | None = None,
) -> Transport:
    """Join the process group of all ranks, at the addresses that torchrun has set in the environment.

    Args:
        backend: "gloo" (CPU), "nccl" (the CUDA device LOCAL_RANK becomes the current one), or the library of another
            kind of accelerator (see `device`); the same on all ranks.
        timeout_s: maximum duration of one wait, in seconds.
        watch: options of hang detection over the ranks; None: the same timeout as waits.
        plan: the plan of the run, registered with the watch as early as possible, as the first one.
        rules: None: the backend's own. Gloo can also follow "nccl", to show that a plan does not depend on tags.

    Raises:
        UsageError: not started by torchrun, unknown backend, or rules that it cannot follow.
        MisfitError: nccl with fewer devices than local ranks, or ranks that name different backends.
        StallError: the others did not join.
    """
    transports: dict[str, dict[Rules, type[_TorchTransport]]] = {
        "gloo": {"rendezvous": GlooTransport, "nccl": FifoGlooTransport},
        **{library: {"nccl": NcclTransport} for library in LIBRARIES},
    }
    if backend not in transports:
        raise UsageError(f"unknown transport {backend!r}{suggest(backend, transports)}")
    by_rules = transports[backend]
    default: Rules = next(iter(by_rules))
    transport = by_rules.get(default if rules is None else rules)
    if transport is None:
        raise UsageError(f"{backend} cannot follow the rules {rules!r}, only {', '.join(by_rules)}")
    device = claim_device(backend)
    timeout, watch = timedelta(seconds=timeout_s), watch or WatchOptions(timeout_s)
    if dist.is_initialized():
        store = PrefixStore("quintsched/watch", dist.distributed_c10d._get_default_store())
        publisher = start_watch(dist.get_rank(), dist.get_world_size(), store, watch, host_waits=transport.blocks_host)
        publisher.tell_first(plan)
        report_uncaught()
        return transport(device, timeout, owns_world=False, publisher=publisher)
    attempt, publisher = _come_together(backend, timeout, watch, plan, host_waits=transport.blocks_host)
    made = transport(device, timeout, owns_world=True, publisher=publisher)
    made.attempt, made.goes_on = attempt, attempt.goes_on
    return made


def _come_together(
    backend: str, timeout: timedelta, watch: WatchOptions, plan: Plan | None, *, host_waits: bool
) -> tuple[StartAttempt, Publisher]:
    """Create the process group of all ranks, with the store keys of this attempt; raises as `connect`.

    Also return the publisher of this rank's position: a new one, or that of a launcher's watch.
    """
    require_addresses()
    rank, world_size, timeout_s = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout.total_seconds()
    require_interfaces()
    choose_interfaces()
    named = find_watch(rank, world_size, watch, host_waits=host_waits)
    if named is not None:
        named.tell_first(plan)
    awaiting = nullcontext() if named is None else named.waiting_for_all()
    with stall_errors(f"waiting {timeout_s:g} s for all ranks to come together", named), awaiting:
        store = open_store(timeout_s)
        attempt = meet(store, rank, world_size, timeout_s)
        require_same_backend(backend, attempt.store, rank)
        own = PrefixStore("watch", attempt.store)
        launchers = PrefixStore(launchers_keys(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), store)
        publisher = named or start_watch(
            rank, world_size, own, watch, host_waits=host_waits, tell=partial(launchers.set, HUB)
        )
        publisher.tell_first(plan)
        world = PrefixStore("world", attempt.store)
        hook = sys.excepthook
        with publisher.waiting_for_all():
            dist.init_process_group(backend, store=world, rank=rank, world_size=world_size, timeout=timeout)
        report_uncaught(hook)
    return attempt, publisher


class _TorchTransport(Transport):
    """Common part of gloo and NCCL: creation of groups, and disconnecting."""

    attempt: StartAttempt | None = None

    def __init__(
        self, device: torch.device, timeout: timedelta, owns_world: bool, publisher: Publisher | None = None
    ) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), device, publisher)
        self._timeout = timeout
        self._owns_world = owns_world
        self._has_failed = False
        self._process_groups: list[dist.ProcessGroup] = []
        self._groups: list[TorchGroup] = []
        self._is_open = True

    def check_everything(self, checks: bool) -> None:
        """Switch checks on or off, also for the group of all ranks, which exists already."""
        super().check_everything(checks)
        if isinstance(self._world_group, TorchGroup):
            self._world_group.compare_collectives(checks)

    def begin_run(self) -> None:
        """Record in the store that the run has begun; an unreachable store means that nobody will restart the run."""
        if self.attempt is not None:
            run_bounded(self.attempt.record_begin, BEGIN_WAITS_S)

    def _new_process_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Create the process group of `ranks`; None on ranks that are not members."""
        what = f"rank {self.rank} connecting with ranks {list(ranks)}"
        with stall_errors(what, self.publisher), self.publisher.waiting_for_all():
            made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout, backend=self.name)
        if self.rank not in ranks:
            return None
        self._process_groups.append(made)
        return made

    def _make_group(self, partition: Sequence[tuple[int, ...]]) -> Group:
        mine: Group = SelfGroup(self.rank, self.device)
        for ranks in partition:
            process_group = self._new_process_group(ranks) if len(ranks) > 1 else None
            if process_group is not None:
                mine = TorchGroup(process_group, ranks, self.device, self.publisher)
                self._groups.append(mine)
                mine.compare_collectives(self.checks_everything)
        directed = self._directed_groups() if any(1 < len(ranks) <= SMALL_GROUP for ranks in partition) else None
        if directed is not None and isinstance(mine, TorchGroup) and len(mine.ranks) <= SMALL_GROUP:
            mine.small = SmallReduces(directed, mine.ranks, len(self.groups))
        self._warm_up(mine)
        return mine

    def _directed_groups(self) -> DirectedGroups | None:
        """Return the process groups of small reductions (collective); None: these go as any others."""
        return None

    @abstractmethod
    def _warm_up(self, group: Group) -> None: ...

    def _issue(
        self, post: Callable[..., dist.Work], tensor: Tensor, key: FrameKey, group_rank: int, peer: int, tag: int
    ) -> Work:
        """Post as torch's isend and irecv do, with the process-group rank `group_rank` of `peer` known in advance."""
        name = partial(self._name, post.__name__, key, peer, tag)
        try:
            work = post([torch.view_as_real(tensor) if tensor.is_complex() else tensor], group_rank, tag)
        except RuntimeError as error:
            raise_stall(error, name(), self.publisher)
        return TorchWork(work, tensor, name, self.publisher)

    def _name(self, verb: str, key: FrameKey, peer: int, tag: int) -> str:
        doing = "sending to" if verb == "send" else "receiving from"
        return f"rank {self.rank} {doing} rank {peer}: {describe_spec(*key)}, tag {tag}"

    def abort(self, error: BaseException) -> None:
        """Publish why this rank fails, then disconnect, which wakes the others."""
        self._has_failed = True
        self.publisher.fail(error)
        self._hang_up(self._abandon)

    def close(self) -> None:
        """Destroy the process groups; waits for peers a few seconds at most."""
        self.publisher.close(clean=not self._has_failed)
        self._hang_up(dist.destroy_process_group)

    def _abandon(self, process_group: dist.ProcessGroup | None) -> None:
        """Destroy a process group, or all for None, even with pending work."""
        dist.destroy_process_group(process_group)

    def _hang_up(self, destroy: Callable[[dist.ProcessGroup | None], None]) -> None:
        if self._is_open:
            self._is_open = False
            for group in self._groups:
                group.release()
            doomed, self._process_groups = self._process_groups, []
            run_bounded(lambda: _destroy_all([None] if self._owns_world else doomed[::-1], destroy), _CLOSE_TIMEOUT_S)


def _hang_up_at_exit(transport: ref[_TorchTransport]) -> None:
    """End the threads of gloo before the interpreter's end, also for an engine that nobody closes.

    They would outlive what they use. After an error other ranks may be waited for in vain: then they are left.
    """
    made = transport()
    if made is not None and getattr(sys, "last_value", None) is None:
        made._hang_up(dist.destroy_process_group)


class GlooTransport(FramedMessages, _TorchTransport):
    """Gloo over TCP, for CPU tensors; messages are matched by tag, so receives may be posted ahead of time."""

    name = "gloo"
    profile = "tagged"
    has_tags = True

    def __init__(
        self, device: torch.device, timeout: timedelta, owns_world: bool, publisher: Publisher | None = None
    ) -> None:
        super().__init__(device, timeout, owns_world, publisher)
        atexit.register(_hang_up_at_exit, ref(self))
        self._directed: DirectedGroups | None = None

    def _warm_up(self, group: Group) -> None:
        """Do nothing: gloo connects when a group is created."""

    def _directed_groups(self) -> DirectedGroups:
        """Return those of all ranks; a group of all ranks lends one, if there is any: threads are per process group."""
        if self._directed is None:
            world = tuple(range(self.world_size))
            of_all = next((group.process_group for group in self._groups if group.ranks == world), None)
            made = [of_all or self._new_process_group(world), self._new_process_group(world)]
            self._directed = DirectedGroups(*[each for each in made if each is not None])
        return self._directed

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        if channels:
            self._directed_groups()

    def _post_send(self, memory: Tensor, key: FrameKey, peer: int, tag: int) -> Work:
        assert self._directed is not None
        post = self._directed.between(self.rank, peer).send
        return self._issue(post, memory, key, peer, peer, tag if self.has_tags else 0)

    def _post_receive(self, memory: Tensor, key: FrameKey, peer: int, tag: int) -> Work:
        assert self._directed is not None
        post = self._directed.between(peer, self.rank).recv
        return self._issue(post, memory, key, peer, peer, tag if self.has_tags else 0)

    def _hang_up(self, destroy: Callable[[dist.ProcessGroup | None], None]) -> None:
        self._directed = None
        super()._hang_up(destroy)


class FifoGlooTransport(GlooTransport):
    """Gloo with NCCL's semantics, to find without a GPU whether a plan depends on tags.

    Gloo's send is a rendezvous at any size, and messages with the same tag arrive in order. With one tag for all, a
    directed pair of ranks is a channel as in NCCL: the k-th send matches the k-th receive, whatever they carry.
    """

    profile = "channel"
    has_tags = False


class NcclTransport(_TorchTransport):
    """NCCL for accelerators; a communicator and a stream per directed channel, which delivers in order.

    The stream is the process group's: it waits for work queued on the caller's current stream up to the call, so that a
    message starts when its tensor is ready, whatever is queued next; and a wait makes the current stream wait for the
    message. An additional stream would cost two more events per message without a benefit. The Work keeps its tensor
    until the wait, because the allocator would hand freed memory to the next tensor of the current stream.

    A wait only blocks the current stream, so a dead peer shows at a later synchronisation, or in torch's watchdog after
    the timeout; torchrun ends the other ranks when one exits with an error.
    """

    name = "nccl"
    profile = "channel"
    blocks_host = False

    def __init__(
        self, device: torch.device, timeout: timedelta, owns_world: bool, publisher: Publisher | None = None
    ) -> None:
        super().__init__(device, timeout, owns_world, publisher)
        self.name = library_of(device)
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}

    def _warm_up(self, group: Group) -> None:
        group.all_reduce(torch.zeros(1, device=self.device)).wait()
        synchronize(self.device)

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        require_queues(self.rank, 1 + len(self._groups) + sum(self.rank in channel for channel in channels))
        for source, destination in channels:
            link = self._new_process_group(sorted((source, destination)))
            if link is not None:
                self._links[source, destination] = link
                token = torch.zeros(1, device=self.device)
                move = self._send if self.rank == source else self._recv
                move(token, destination if self.rank == source else source, 0, NO_LABEL).wait()
                synchronize(self.device)

    def _send(self, tensor: Tensor, peer: int, tag: int, label: Label) -> Work:
        key, link = (tensor.dtype, tensor.shape), self._links[self.rank, peer]
        return self._issue(link.send, tensor, key, int(peer > self.rank), peer, tag)

    def _recv(self, buffer: Tensor, peer: int, tag: int, label: Label) -> Work:
        key, link = (buffer.dtype, buffer.shape), self._links[peer, self.rank]
        return self._issue(link.recv, buffer, key, int(peer > self.rank), peer, tag)

    def _abandon(self, process_group: dist.ProcessGroup | None) -> None:
        dist.distributed_c10d._abort_process_group(process_group)

    def _hang_up(self, destroy: Callable[[dist.ProcessGroup | None], None]) -> None:
        self._links.clear()
        super()._hang_up(destroy)


def require_same_backend(backend: str, store: Store, rank: int) -> None:
    """Raise `MisfitError` on ranks with another backend than rank 0's, before they wait for each other in vain."""
    if rank == 0:
        store.set("backend", backend)
    first = store.get("backend").decode()
    if first != backend:
        raise MisfitError(
            f"rank {rank} connects over {backend}, but rank 0 over {first}; give every rank of every node a device, or "
            "set runtime.transport to gloo"
        )


def _destroy_all(
    process_groups: Sequence[dist.ProcessGroup | None], destroy: Callable[[dist.ProcessGroup | None], None]
) -> None:
    for process_group in process_groups:
        destroy(process_group)
