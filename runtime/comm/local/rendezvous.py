"""Collectives between the threads of one process: the members of a group meet, the last one to come does the work.

    rank 0 ── brings its tensors ──▶ meeting k of the group ◀── brings its tensors ── rank 1
                                     all there: combined in the order of ranks, written to all outputs

What a member brings is neither copied nor read until the last one comes, so a tensor that is changed too early gives
a wrong result, as on a real wire; results are bitwise the same on all ranks and from run to run.

NCCL wants collectives of several communicators launched in one order by all ranks that are in them. Counting finds out:
when a rank issues the k-th collective of a group, it must have issued as many of another group as every other
rank that is in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quintsched.errors import MisfitError

from ..base import ReduceOp, describe
from ..clock import now_s

GroupKey = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Collective:
    """What a member issues, which must be the same for all: its kind with operation or source, and the tensor.

    Only an all-to-all brings rows that differ: so many for each member, and from each.
    """

    kind: str
    detail: ReduceOp | int | None
    tensor: Tensor
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()

    def fits(self, other: Collective) -> bool:
        """Say whether these two can meet."""
        return self._is_alike() == other._is_alike()

    def _is_alike(self) -> tuple[object, ...]:
        shape = self.tensor.shape[1:] if self.sent else self.tensor.shape
        return self.kind, self.detail, len(self.sent), shape, self.tensor.dtype

    def __str__(self) -> str:
        detail = self.detail.value if isinstance(self.detail, ReduceOp) else self.detail
        return " ".join(str(word) for word in (self.kind, detail, describe(self.tensor)) if word is not None)


Distribute = Callable[[list[Collective]], Sequence[Tensor]]
"""What all members brought → the result of each."""


@dataclass(slots=True)
class Meeting:
    """The `number`-th collective of a group: what its members brought, and where they want the result."""

    group: GroupKey
    number: int
    first: tuple[int, Collective]
    brought: dict[int, tuple[Collective, Tensor]] = field(default_factory=dict)
    launched: dict[GroupKey, tuple[int, int]] = field(default_factory=dict)
    arrival_s: float | None = None

    def hold(self, distribute: Distribute, arrival_s: float) -> None:
        """Combine what all members brought and give each its result, which is there at a time of `now_s`."""
        members = [self.brought[rank] for rank in self.group[1]]
        for (_, output), result in zip(members, distribute([collective for collective, _ in members]), strict=True):
            output.copy_(result)
        self.brought.clear()
        self.arrival_s = arrival_s

    def finish(self) -> None:
        """Nothing is left to do: the last member to come wrote all results."""

    def describe_to(self, rank: int) -> str:
        """Say which collective this is."""
        return f"{self.first[1]} with ranks {list(self.group[1])}, collective {self.number} of the group"


class Meetings:
    """All meetings of a world that have begun and not ended. Calls are made with the world's lock held.

    With `one_order`, ranks with two groups in common must issue their collectives in the same order. A collective takes
    `collective_s` seconds from when the last member brings its tensor; a group does one at a time.
    """

    def __init__(self, one_order: bool, collective_s: float) -> None:
        self._one_order, self._collective_s = one_order, collective_s
        self._free_s: dict[GroupKey, float] = {}
        self._open: dict[tuple[GroupKey, int], Meeting] = {}
        self._issued: defaultdict[int, dict[GroupKey, int]] = defaultdict(dict)

    @property
    def num_open(self) -> int:
        """How many meetings wait for a member."""
        return len(self._open)

    def enter(self, rank: int, group: GroupKey) -> None:
        """Note that `rank` is a member of `group`."""
        self._issued[rank][group] = 0

    def join(
        self, rank: int, group: GroupKey, collective: Collective, output: Tensor, distribute: Distribute
    ) -> Meeting:
        """Bring a tensor to the next meeting of the group, and hold it if all members are there.

        Raises:
            MisfitError: the members issue different collectives, or those of two groups in different orders.
        """
        issued = self._issued[rank]
        number = issued[group]
        meeting = self._open.get((group, number))
        if meeting is None:
            meeting = self._open[group, number] = Meeting(group, number, (rank, collective))
        other, expected = meeting.first
        if not collective.fits(expected):
            raise MisfitError(f"collective {number}: rank {other} issued {expected}, rank {rank} {collective}")
        if self._one_order:
            _require_one_order(meeting, rank, issued)
        issued[group] = number + 1
        meeting.brought[rank] = (collective, output)
        if len(meeting.brought) == len(group[1]):
            del self._open[group, number]
            meeting.hold(distribute, self._arrival_s(group))
        return meeting

    def _arrival_s(self, group: GroupKey) -> float:
        """Return when a collective is done that begins now; 0 where that takes no time."""
        if not self._collective_s:
            return 0.0
        self._free_s[group] = max(now_s(), self._free_s.get(group, 0.0)) + self._collective_s
        return self._free_s[group]


def _require_one_order(meeting: Meeting, rank: int, issued: dict[GroupKey, int]) -> None:
    """Compare how far `rank` is in its other groups with the first member of this meeting that is in them too."""
    for group, count in issued.items():
        if group == meeting.group:
            continue
        other, expected = meeting.launched.setdefault(group, (rank, count))
        if count != expected:
            name = f"collective {meeting.number} of ranks {list(meeting.group[1])}"
            counts = f"rank {other} issued it after {expected} of ranks {list(group[1])}, rank {rank} after {count}"
            raise MisfitError(f"{name}: {counts}; NCCL wants one launch order on all ranks")
