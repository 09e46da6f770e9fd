"""What the threads of one run share: mailboxes, meetings, and who waits for what.

As all waits happen under one lock, a deadlock is seen, not timed out: when every rank waits and nothing that
is waited for can come, all of them get a StallError that lists who waits for what. This takes for granted that a
rank is one thread.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import NoReturn

import torch
from torch import Tensor

from quintsched.errors import MisfitError, StallError

from .base import ReduceOp

_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


@dataclass
class Mailbox:
    """Messages of one (source, destination, tag), numbered in order of sending."""

    sent: int = 0
    expected: int = 0
    messages: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Meeting:
    """One collective of one group: what each member brought, and how many have yet to take the result."""

    ranks: tuple[int, ...]
    signature: str
    op: ReduceOp
    brought: dict[int, Tensor] = field(default_factory=dict)
    taken: int = 0

    def full(self) -> bool:
        """Say whether all members came."""
        return len(self.brought) == len(self.ranks)

    @cached_property
    def in_order(self) -> list[Tensor]:
        """What the members brought, in the order of ranks."""
        return [self.brought[rank] for rank in self.ranks]

    @cached_property
    def combined(self) -> Tensor:
        """What the members brought, reduced in the order of ranks."""
        return reduce(_COMBINE[self.op], self.in_order)


@dataclass
class _Wait:
    what: str
    ready: Callable[[], bool]


class LocalWorld:
    """What the threads of one run share: mailboxes, meetings, and who waits for what.

    Args:
        world_size: number of ranks.
        device: where their tensors live.
        timeout_s: longest that one wait may take, in seconds.
        rendezvous: whether a send is done only when its receive is there, as on a wire that holds nothing.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        rendezvous: bool = False,
    ) -> None:
        self.rendezvous = rendezvous
        self.world_size = world_size
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.failure: tuple[int, BaseException] | None = None
        self.changed = threading.Condition()
        self.mailboxes: defaultdict[tuple[int, int, int], Mailbox] = defaultdict(Mailbox)
        self.meetings: dict[tuple[int, tuple[int, ...], int], Meeting] = {}
        self._partitions: dict[int, tuple[int, list[tuple[int, ...]]]] = {}
        self._waits: dict[int, _Wait] = {}
        self._closed: set[int] = set()

    def abort(self, rank: int, error: BaseException) -> None:
        """Wake all ranks with a StallError that names `rank`; the first failure stays."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()

    def close(self, rank: int) -> None:
        """Note that `rank` will not send any more; those who wait for it are told."""
        with self.changed:
            self._closed.add(rank)
            self.changed.notify_all()

    def wait_for_end(self) -> None:
        """Return when all ranks have ended, or one failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or len(self._closed) == self.world_size)

    def agree(self, rank: int, call: int, partition: list[tuple[int, ...]]) -> None:
        """Check that the `call`-th partition is the same list on all ranks."""
        with self.changed:
            first, expected = self._partitions.setdefault(call, (rank, partition))
        if partition != expected:
            raise MisfitError(f"group {call}: rank {first} splits the world into {expected}, rank {rank} {partition}")

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Wait, with `changed` held, until `ready()`.

        Raises:
            StallError: another rank failed, all ranks wait for each other, or the timeout is over.
        """
        deadline = time.monotonic() + self.timeout_s
        self._waits[rank] = _Wait(what, ready)
        try:
            while not ready():
                self._stop_if_hopeless(rank, what)
                left = deadline - time.monotonic()
                if left <= 0:
                    self._stall(rank, f"rank {rank} waited {self.timeout_s:g} s for {what}")
                self.changed.wait(left)
        finally:
            del self._waits[rank]

    def _stop_if_hopeless(self, rank: int, what: str) -> None:
        if self.failure:
            culprit, error = self.failure
            reason = f"rank {culprit} failed first: {type(error).__name__}: {error}"
            raise StallError(f"rank {rank} stopped waiting for {what}; {reason}") from error
        all_idle = len(self._waits) + len(self._closed - self._waits.keys()) == self.world_size
        if all_idle and not any(wait.ready() for wait in self._waits.values()):
            waits = [f"\n  rank {r} waits for {wait.what}" for r, wait in sorted(self._waits.items())]
            ends = [f"\n  rank {r} has ended" for r in sorted(self._closed)]
            self._stall(rank, "deadlock: nothing that is waited for can come" + "".join(waits + ends))

    def _stall(self, rank: int, message: str) -> NoReturn:
        error = StallError(message)
        self.abort(rank, error)
        raise error
