"""Groups and works over torch.distributed, whose errors name the operation that failed.

TorchGroup.all_reduce ─▶ dist.all_reduce(…, async_op=True) ─▶ a Work ─▶ wait: done, or a StallError with the verdict

Optional comparison of collectives before they begin: gloo reduces any operands, also where ranks differ in order.

    rank 0   all_reduce sum float32 (4,)   ─┐
    rank 1   all_gather float32 (4,)       ─┴▶ one all-gather of each rank's next call ─▶ MisfitError on both

The comparison waits for all members before each collective, so it is for debugging only (`runtime.verify`).

Errors of failed peers: which wait failed, and which rank caused it.

torch's messages name neither rank nor operation, and the rank that raises is rarely the one that failed. So a rank
whose wait failed asks the watch (`watch`), which monitors all ranks; without one it names the operation it waited for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quintsched.check_call_arguments import shown
from quintsched.errors import MisfitError, StallError, UsageError, counted
from quintsched.stalls.own_error_or_lost_peer import came_from_handler, headline, is_own, lost_peer
from quintsched.stalls.verdict_text import NO_CULPRIT

from ..watch.position_in_shared_memory import NOTHING, WaitCell
from ..watch.position_publisher import Publisher
from .checked.gloo_small_reduces import SmallReduces
from .device import current_device
from .transport_interface import Group, ReduceOp, SelfGroup, Work, describe

Result = TypeVar("Result")

_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch's all-gather into one tensor: torch 2.13 deprecates the old name, and introduces the new one."""

_NOT_A_STALL = re.compile(
    r"scalar type|unsupported|not supported|no backend type|invalid (argument|usage)", re.IGNORECASE
)


@contextmanager
def stall_errors(what: str, publisher: Publisher | None = None) -> Iterator[None]:
    """Turn torch's error about a lost or late peer into a StallError that names the operation, `what`."""
    try:
        yield
    except RuntimeError as error:
        raise_stall(error, what, publisher)


def raise_stall(error: RuntimeError, what: str, publisher: Publisher | None = None) -> NoReturn:
    """Raise torch's error as a StallError that names the operation, `what`; unchanged, if no peer is to blame.

    No peer is to blame for an error of a signal handler during a wait, as torch's for a dead DataLoader worker.
    """
    if _NOT_A_STALL.search(str(error)) or came_from_handler(error):
        raise error
    said = f"{what}: a peer died or does not answer ({str(error).strip().splitlines()[0]})"
    verdict = publisher.explain_failed_wait(said) if publisher else None
    if verdict is None or not verdict.message:
        raise StallError(said) from error
    named_nobody = verdict.message.startswith(NO_CULPRIT)
    stall = StallError(f"{verdict.message}\n{said}" if named_nobody else verdict.message)
    stall.was_told = verdict.was_told
    raise stall from error


def as_stall(error: BaseException, publisher: Publisher) -> BaseException:
    """Return the verdict for an error of a user's own collective that failed for a lost peer; any other unchanged.

    So a rank that only lost a peer does not blame its user code.
    """
    if is_own(error) or lost_peer(error):
        return error
    verdict = publisher.explain_failed_wait(headline(error), in_code=True)
    if verdict is None or not verdict.message or verdict.message.startswith(NO_CULPRIT):
        return error
    stall = StallError(verdict.message)
    stall.was_told = verdict.was_told
    return stall


def run_bounded(call: Callable[[], Result], timeout_s: float) -> Result | None:
    """Return `call()`, or None where it fails or takes longer than `timeout_s`; never hangs, never raises."""
    answers: list[Result] = []

    def run() -> None:
        try:
            answers.append(call())
        except (RuntimeError, ValueError, AssertionError):
            return

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        thread.join(timeout_s)
    except RuntimeError:  # Python 3.12 starts no thread once it exits
        run()
    return answers[0] if answers else None


_REDUCE_OPS = {ReduceOp.SUM: dist.ReduceOp.SUM, ReduceOp.MAX: dist.ReduceOp.MAX, ReduceOp.MIN: dist.ReduceOp.MIN}


def as_group(group: Group | dist.ProcessGroup) -> Group:
    """Return `group` as a Group; a ProcessGroup (of a DeviceMesh, for example) is wrapped."""
    if isinstance(group, Group):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"group is {shown(group)}; give a Group, or a ProcessGroup of torch.distributed")
    ranks = tuple(dist.get_process_group_ranks(group))
    device = current_device(dist.get_backend(group))
    return TorchGroup(group, ranks, device, Publisher()) if len(ranks) > 1 else SelfGroup(ranks[0], device)


class TorchGroup(Group):
    """Collectives over a torch ProcessGroup."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        device: torch.device,
        publisher: Publisher,
    ) -> None:
        super().__init__(ranks, dist.get_rank(process_group), device)
        self.process_group: dist.ProcessGroup | None = process_group
        self._publisher = publisher
        self._checks: SameCollectives | None = None
        self.small: SmallReduces | None = None

    def compare_collectives(self, compares: bool) -> None:
        """Switch comparison of collectives before they begin on or off; all members call this."""
        checks = SameCollectives(self.ranks, self.index, self.device, self._gather_now)
        self._checks = checks if compares else None

    def _gather_now(self, output: Tensor, tensor: Tensor) -> None:
        self._started(partial(_GATHER, output, tensor), partial(self._name, "comparison", tensor), output).wait()

    def release(self) -> None:
        """Drop the process groups: gloo closes its connections with the last reference."""
        self.process_group = self.small = None

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        if self.small is not None and self.small.takes(tensor):
            issue: Callable[..., Pending] = partial(self.small.begin, tensor, op)
        else:
            issue = partial(dist.all_reduce, tensor, _REDUCE_OPS[op])
        return self._issue(issue, f"all_reduce {op.value}", tensor, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        gather = self._broadcast_parts if tensor.is_cpu and tensor.nbytes >= 1 << 18 else _GATHER
        return self._issue(partial(gather, output, tensor), "all_gather", tensor, output)

    def _broadcast_parts(self, output: Tensor, tensor: Tensor, **how: Any) -> torch.futures.Future[Any]:
        """Start to gather large shards in place; gloo's own fills a copy of all of it, in half as much time again."""
        parts = output.data.view(-1).view(torch.uint8).chunk(self.size)  # `data`: autograd sees no write
        parts[self.index].copy_(tensor.data.view(-1).view(torch.uint8))
        works = [dist.broadcast(part, rank, **how) for part, rank in zip(parts, self.ranks, strict=True)]
        return torch.futures.collect_all([work.get_future() for work in works])

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        if tensor.device.type == "cpu" and self.is_shard_in_place(output, tensor):
            # gloo sums a copy of all of it, in half as much time again as its all-reduce takes in place.
            return self._all_reduce(tensor, ReduceOp.SUM)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        if tensor.is_complex():  # the only collective that does not take complex tensors
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
        rank = self.ranks[source]
        return self._issue(partial(dist.broadcast, tensor, rank), f"broadcast from rank {rank}", tensor, tensor)

    def _issue(self, issue: Callable[..., Pending], kind: str, tensor: Tensor, output: Tensor) -> Work:
        name = partial(self._name, kind, tensor)
        if self._checks is not None and kind != "all_to_all":
            self._checks.require(f"{kind} {describe(tensor)}")
        return self._started(issue, name, output)

    def _started(self, issue: Callable[..., Pending], name: Callable[[], str], output: Tensor) -> Work:
        try:
            work = issue(group=self.process_group, async_op=True)
        except RuntimeError as error:
            raise_stall(error, name(), self._publisher)
        return _CollectiveWork(work, output, name, self._publisher, self.wait_cell, self.wait_code)

    def _name(self, kind: str, tensor: Tensor) -> str:
        return f"rank {self.ranks[self.index]} in {kind} {describe(tensor)} with ranks {list(self.ranks)}"


Pending = dist.Work | Work | torch.futures.Future[Any] | None


class TorchWork:
    """A torch Work that keeps its tensors until it is waited for, and raises StallError.

    `name` returns the operation in words. It is called on failure only: composing the words takes microseconds, as
    long as a message.
    """

    __slots__ = ("_name", "_publisher", "_tensor", "_work")

    def __init__(self, work: Pending, tensor: Tensor, name: Callable[[], str], publisher: Publisher) -> None:
        self._work = work
        self._tensor: Tensor | None = tensor
        self._name: Callable[[], str] | None = name
        self._publisher = publisher

    def wait(self) -> None:
        """Wait as `Work` does; a second call returns at once."""
        if self._work is None or self._name is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise_stall(error, self._name(), self._publisher)
        self._work = self._tensor = self._name = None


class _CollectiveWork(TorchWork):
    """A collective of a group that publishes in the wait cell while it is waited for."""

    __slots__ = ("_cell", "_code")

    def __init__(
        self,
        work: Pending,
        tensor: Tensor,
        name: Callable[[], str],
        publisher: Publisher,
        cell: WaitCell,
        code: int,
    ) -> None:
        super().__init__(work, tensor, name, publisher)
        self._cell, self._code = cell, code

    def wait(self) -> None:
        """Wait as `TorchWork` does, and publish the wait meanwhile."""
        cell = self._cell
        cell.memory[cell.at] = self._code
        super().wait()
        cell.memory[cell.at] = NOTHING


_WORDS_BYTES = 192
_MOST_SHOWN = 8

Gather = Callable[[Tensor, Tensor], None]
"""Fills (size × n) with the members' (n), and returns when that is done."""


class SameCollectives:
    """Compares the next collective of a group's members.

    Args:
        ranks: the members.
        index: this rank's index among them.
        device: the device of their tensors.
        gather: gathers bytes.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device, gather: Gather) -> None:
        self._ranks, self._index, self._device, self._gather = ranks, index, device, gather
        self._number = 0

    def require(self, words: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> None:
        """Raise `MisfitError` on all members unless all pass the same words, and row counts match (collective)."""
        self._number += 1
        told = f"{self._number}: {words}".encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES, b"\0")
        rows = torch.tensor([*sent, *received], dtype=torch.int64).view(torch.uint8)
        mine = torch.cat([torch.frombuffer(bytearray(told), dtype=torch.uint8), rows]).to(self._device)
        said = self._exchange(mine[:_WORDS_BYTES])
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]
        if len(set(texts)) > 1:
            each = [f"rank {rank} {text}" for rank, text in zip(self._ranks, texts, strict=True)]
            more = [f"and {len(each) - _MOST_SHOWN} more"] if len(each) > _MOST_SHOWN else []
            listed = "; ".join([*each[:_MOST_SHOWN], *more])
            raise MisfitError(f"ranks {list(self._ranks)} do not begin the same collective, by number: {listed}")
        if sent:
            self._require_rows(self._exchange(mine[_WORDS_BYTES:]))

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        gathered = mine.new_empty(len(self._ranks) * len(mine))
        self._gather(gathered, mine.contiguous())
        return list(gathered.cpu().split(len(mine)))

    def _require_rows(self, said: Sequence[Tensor]) -> None:
        tables = [row.view(torch.int64).tolist() for row in said]
        for source, table in enumerate(tables):
            for target, its in enumerate(tables):
                sends, expects = table[target], its[len(tables) + source]
                if sends != expects:
                    raise MisfitError(
                        f"all_to_all {self._number} of ranks {list(self._ranks)}: rank {self._ranks[source]} sends "
                        f"{counted(sends, 'row')} to rank {self._ranks[target]}, which expects {expects}"
                    )
