"""Collectives and messages of torch.distributed, as works whose errors say what was under way.

TorchGroup.all_reduce ─▶ dist.all_reduce(…, async_op=True) ─▶ a Work ─▶ wait: done, or a StallError with the verdict
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..watch.publisher import Publisher
from ..watch.waiting import NOTHING, WaitCell
from .base import Group, ReduceOp, SelfGroup, Work, describe
from .checked.collectives import SameCollectives
from .device import current_device
from .failures import raise_stall

_REDUCE_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}


def as_group(group: Group | dist.ProcessGroup) -> Group:
    """Return `group` as a Group; a ProcessGroup (of a DeviceMesh, say) is wrapped."""
    if isinstance(group, Group):
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    device = current_device(dist.get_backend(group))
    return TorchGroup(group, ranks, device, Publisher()) if len(ranks) > 1 else SelfGroup(ranks[0], device)


class TorchGroup(Group):
    """Collectives over a torch ProcessGroup."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], device: torch.device, publisher: Publisher
    ) -> None:
        super().__init__(ranks, dist.get_rank(process_group), device)
        self.process_group: dist.ProcessGroup | None = process_group
        self._publisher = publisher
        self._checks: SameCollectives | None = None

    def compare_collectives(self, compares: bool) -> None:
        """From now on compare each collective before it begins, or do not; all members call this."""
        checks = SameCollectives(self.ranks, self.index, self.device, self._gather_now)
        self._checks = checks if compares else None

    def _gather_now(self, output: Tensor, tensor: Tensor) -> None:
        name, issue = partial(self._name, "comparison", tensor), partial(_gather_into(), output, tensor)
        self._started(issue, name, output).wait()

    def release(self) -> None:
        """Let go of the process group: gloo's connections close with the last reference."""
        self.process_group = None

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        issue = partial(dist.all_reduce, tensor, _REDUCE_OPS[op])
        return self._issue(issue, f"all_reduce {op.value}", tensor, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._issue(partial(_gather_into(), output, tensor), "all_gather", tensor, output)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.device.type == "cpu" and self.is_shard_in_place(output, tensor):
            # gloo sums a copy of all of it, in half as much time again as its all-reduce takes in place.
            return self._all_reduce(tensor, ReduceOp.SUM)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        if tensor.is_complex():  # which it alone of the collectives does not take
            output, tensor = torch.view_as_real(output), torch.view_as_real(tensor)
        return self._issue(partial(scatter, output, tensor), "reduce_scatter", tensor, output)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work:
        splits = None if received is None else list(received), None if sent is None else list(sent)
        if self._checks is not None:
            self._checks.require(f"all_to_all {describe(tensor[:0])}", sent or (), received or ())
        return self._issue(partial(dist.all_to_all_single, output, tensor, *splits), "all_to_all", tensor, output)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        issue = partial(dist.broadcast, tensor, self.ranks[source])
        return self._issue(issue, f"broadcast from rank {self.ranks[source]}", tensor, tensor)

    def _issue(self, issue: Callable[..., dist.Work | None], kind: str, tensor: Tensor, output: Tensor) -> Work:
        name = partial(self._name, kind, tensor)
        if self._checks is not None and kind != "all_to_all":
            self._checks.require(f"{kind} {describe(tensor)}")
        return self._started(issue, name, output)

    def _started(self, issue: Callable[..., dist.Work | None], name: Callable[[], str], output: Tensor) -> Work:
        try:
            work = issue(group=self.process_group, async_op=True)
        except RuntimeError as error:
            raise_stall(error, name(), self._publisher)
        return _CollectiveWork(work, output, name, self._publisher, self.wait_cell, self.wait_code)

    def _name(self, kind: str, tensor: Tensor) -> str:
        return f"rank {self.ranks[self.index]} in {kind} {describe(tensor)} with ranks {list(self.ranks)}"


def _gather_into() -> Callable[..., dist.Work | None]:
    """Return torch's gather into one tensor: 2.13 deprecates the old name and has the new one only since."""
    found: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


class TorchWork:
    """A torch Work that keeps its tensors until waited for, and whose errors are ours.

    `name` says in words what is under way. It is called when something failed: a message is a matter of
    microseconds, and so would be the words.
    """

    __slots__ = ("_name", "_publisher", "_tensor", "_work")

    def __init__(self, work: dist.Work | None, tensor: Tensor, name: Callable[[], str], publisher: Publisher) -> None:
        self._work = work
        self._tensor: Tensor | None = tensor
        self._name: Callable[[], str] | None = name
        self._publisher = publisher

    def wait(self) -> None:
        """Wait as `Work` says; the second time there is nothing to wait for."""
        if self._work is None or self._name is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise_stall(error, self._name(), self._publisher)
        self._work = self._tensor = self._name = None


class _CollectiveWork(TorchWork):
    """A collective of a group, which says that it is waited for."""

    __slots__ = ("_cell", "_code")

    def __init__(
        self,
        work: dist.Work | None,
        tensor: Tensor,
        name: Callable[[], str],
        publisher: Publisher,
        cell: WaitCell,
        code: int,
    ) -> None:
        super().__init__(work, tensor, name, publisher)
        self._cell, self._code = cell, code

    def wait(self) -> None:
        """The same, and say meanwhile that it is waited for."""
        cell = self._cell
        cell.memory[cell.at] = self._code
        super().wait()
        cell.memory[cell.at] = NOTHING
