"""Gloo and NCCL, through torch.distributed.

    gloo   messages: one process group for all of them, matched by tag        collectives: a process group each
    nccl   messages: one process group (communicator, stream) per channel     collectives: a process group each

Process groups are made with plain `new_group`, called by every rank for every group, members or not. That costs a
rank that is no member 8 µs and no message, and the groups get the same names everywhere. The option
`use_local_synchronization` must not be used here: it derives the name from the number of groups that the rank has
made so far (up to torch 2.13, see pytorch#189073), so rank 1 of a pipeline 0-1-2, already in a channel with rank 0,
would wait for rank 2 under another name for ever.

NCCL makes a communicator at the first operation on a process group, blocking its caller. So each group does one
operation as soon as it is made, in the order that all ranks share; nothing is made later, in the middle of a step.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from quintsched.errors import MisfitError, StallError, UsageError, suggest

from .base import Group, ReduceOp, SelfGroup, Transport, Work, describe
from .peers import Blame, run_bounded, stall_errors

_REDUCE_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}
_CLOSE_TIMEOUT_S = 10.0


def connect(backend: Literal["gloo", "nccl"], timeout_s: float = 1800.0) -> Transport:
    """Join the other ranks, with the addresses that torchrun put into the environment.

    Args:
        backend: "gloo" (CPU) or "nccl" (the CUDA device that LOCAL_RANK names becomes the current one).
        timeout_s: the longest that one wait may take, in seconds.

    Raises:
        UsageError: not started by torchrun, or no such backend.
        MisfitError: nccl with fewer devices than local ranks.
        StallError: the others did not come.
    """
    transports: dict[str, type[_TorchTransport]] = {"gloo": GlooTransport, "nccl": NcclTransport}
    if backend not in transports:
        raise UsageError(f"unknown transport {backend!r}{suggest(backend, transports)}")
    device = _cuda_device() if backend == "nccl" else torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    owns_world = not dist.is_initialized()
    if owns_world:
        _require_torchrun()
        with stall_errors(f"waiting {timeout_s:g} s for all ranks to come together"):
            dist.init_process_group(backend, timeout=timeout)
    return transports[backend](device, timeout, owns_world)


def as_group(group: Group | dist.ProcessGroup) -> Group:
    """Return `group` as a Group; a ProcessGroup (of a DeviceMesh, say) is wrapped."""
    if isinstance(group, Group):
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    on_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    return TorchGroup(group, ranks, device, Blame()) if len(ranks) > 1 else SelfGroup(ranks[0], device)


class TorchGroup(Group):
    """Collectives over a torch ProcessGroup."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, blame: Blame
    ) -> None:
        super().__init__(ranks, dist.get_rank(process_group), device)
        self._process_group: dist.ProcessGroup | None = process_group
        self._blame = blame

    def release(self) -> None:
        """Let go of the process group: gloo's connections close with the last reference."""
        self._process_group = None

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        what = self._name(f"all_reduce {op.value}", tensor)
        with stall_errors(what, self._blame):
            work = dist.all_reduce(tensor, _REDUCE_OPS[op], group=self._process_group, async_op=True)
        return _TorchWork(work, (tensor,), what, self._blame)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        what = self._name("all_gather", tensor)
        # torch 2.13 deprecates the old name and has the new one only since.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with stall_errors(what, self._blame):
            work = gather(output, tensor, group=self._process_group, async_op=True)
        return _TorchWork(work, (output, tensor), what, self._blame)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        what = self._name("reduce_scatter", tensor)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with stall_errors(what, self._blame):
            work = scatter(output, tensor, group=self._process_group, async_op=True)
        return _TorchWork(work, (output, tensor), what, self._blame)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        what = self._name(f"broadcast from rank {self.ranks[source]}", tensor)
        with stall_errors(what, self._blame):
            work = dist.broadcast(tensor, self.ranks[source], group=self._process_group, async_op=True)
        return _TorchWork(work, (tensor,), what, self._blame)

    def _name(self, kind: str, tensor: Tensor) -> str:
        return f"rank {self.ranks[self.index]} in {kind} {describe(tensor)} with ranks {list(self.ranks)}"


class _TorchWork:
    """A torch Work that keeps its tensors until waited for, and whose errors are ours."""

    def __init__(self, work: dist.Work | None, tensors: tuple[Tensor, ...], what: str, blame: Blame) -> None:
        self._work = work
        self._tensors = tensors
        self._what = what
        self._blame = blame

    def wait(self) -> None:
        if self._work is not None:
            with stall_errors(self._what, self._blame):
                self._work.wait()
        self._work = None
        self._tensors = ()


class _TorchTransport(Transport):
    """What gloo and NCCL share: making groups, blaming and hanging up."""

    def __init__(self, device: torch.device, timeout: timedelta, owns_world: bool) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), device)
        self._timeout = timeout
        self._owns_world = owns_world
        self._blame = Blame()
        self._process_groups: list[dist.ProcessGroup] = []
        self._groups: list[TorchGroup] = []
        self._is_open = True

    def _new_process_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Make the process group of `ranks`; None on ranks that are not among them."""
        with stall_errors(f"rank {self.rank} connecting with ranks {list(ranks)}", self._blame):
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
                mine = TorchGroup(process_group, ranks, self.device, self._blame)
                self._groups.append(mine)
        self._warm_up(mine)
        return mine

    @abstractmethod
    def _warm_up(self, group: Group) -> None: ...

    def _point_to_point(self, is_send: bool, tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> Work:
        verb = f"sending to rank {peer}" if is_send else f"receiving from rank {peer}"
        what = f"rank {self.rank} {verb}: {describe(tensor)}, tag {tag}"
        with stall_errors(what, self._blame):
            work = (dist.isend if is_send else dist.irecv)(tensor, peer, group=group, tag=tag)
        return _TorchWork(work, (tensor,), what, self._blame)

    def abort(self, error: BaseException) -> None:
        """Leave word of who failed, then hang up, which wakes the others."""
        if not isinstance(error, StallError):
            self._blame.accuse(self.rank, error)
        self._hang_up(dist.distributed_c10d._abort_process_group if self.name == "nccl" else dist.destroy_process_group)

    def close(self) -> None:
        """Destroy the process groups; does not wait for peers longer than a few seconds."""
        self._hang_up(dist.destroy_process_group)

    def _hang_up(self, destroy: Callable[[dist.ProcessGroup | None], None]) -> None:
        if self._is_open:
            self._is_open = False
            for group in self._groups:
                group.release()
            doomed, self._process_groups = self._process_groups, []
            run_bounded(lambda: _destroy_all([None] if self._owns_world else doomed[::-1], destroy), _CLOSE_TIMEOUT_S)


class GlooTransport(_TorchTransport):
    """Tensors on the CPU over TCP; messages are matched by tag, so receives may be posted ahead of time."""

    name = "gloo"
    profile = "tagged"

    def __init__(self, device: torch.device, timeout: timedelta, owns_world: bool) -> None:
        super().__init__(device, timeout, owns_world)
        self._messages: dist.ProcessGroup | None = None

    def _warm_up(self, group: Group) -> None:
        """Gloo connects when a group is made."""

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        if channels and self._messages is None:
            self._messages = self._new_process_group(range(self.world_size))

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        assert self._messages is not None
        return self._point_to_point(True, tensor, peer, self._messages, tag)

    def _recv(self, buffer: Tensor, peer: int, tag: int) -> Work:
        assert self._messages is not None
        return self._point_to_point(False, buffer, peer, self._messages, tag)

    def _hang_up(self, destroy: Callable[[dist.ProcessGroup | None], None]) -> None:
        self._messages = None
        super()._hang_up(destroy)


class NcclTransport(_TorchTransport):
    """Tensors on CUDA devices; a communicator and a stream per directed channel, first in, first out.

    A wait only holds up the current stream, so a dead peer shows at a later synchronisation, or in torch's watchdog
    after the timeout; torchrun ends the others when one rank exits with an error.
    """

    name = "nccl"
    profile = "channel"

    def __init__(self, device: torch.device, timeout: timedelta, owns_world: bool) -> None:
        super().__init__(device, timeout, owns_world)
        self._links: dict[tuple[int, int], dist.ProcessGroup] = {}

    def _warm_up(self, group: Group) -> None:
        group.all_reduce(torch.zeros(1, device=self.device)).wait()
        torch.cuda.synchronize(self.device)

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        for source, destination in channels:
            link = self._new_process_group(sorted((source, destination)))
            if link is not None:
                self._links[source, destination] = link
                token = torch.zeros(1, device=self.device)
                move = self._send if self.rank == source else self._recv
                move(token, destination if self.rank == source else source, 0).wait()
                torch.cuda.synchronize(self.device)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._point_to_point(True, tensor, peer, self._links[self.rank, peer], tag)

    def _recv(self, buffer: Tensor, peer: int, tag: int) -> Work:
        return self._point_to_point(False, buffer, peer, self._links[peer, self.rank], tag)

    def _hang_up(self, destroy: Callable[[dist.ProcessGroup | None], None]) -> None:
        self._links.clear()
        super()._hang_up(destroy)


def _require_torchrun() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(f"{', '.join(missing)} not in the environment; start the ranks with torchrun")


def _cuda_device() -> torch.device:
    """Make the device that LOCAL_RANK names the current one."""
    local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if num_devices == 0:
        raise MisfitError("transport nccl wants a CUDA device and there is none; choose gloo")
    if local_rank >= num_devices and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise MisfitError(
            f"local rank {local_rank} wants a device of its own and there are {num_devices}; start fewer ranks per "
            "node (or, from NCCL 2.30 on, let ranks share a device with NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    device = torch.device("cuda", local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def _destroy_all(
    process_groups: Sequence[dist.ProcessGroup | None], destroy: Callable[[dist.ProcessGroup | None], None]
) -> None:
    for process_group in process_groups:
        destroy(process_group)
