"""Collectives between the threads of one process: members join a meeting, and the last one computes the results.

    rank 0 ── its tensors ──▶ meeting k of the group ◀── its tensors ── rank 1
                                     all joined: combined in the order of ranks, written to all outputs

Tensors are neither copied nor read until the last member joins, so one that is modified too early gives a wrong result,
as on a real wire; results are bitwise the same on all ranks and from run to run.

NCCL may run the collectives of a rank one at a time, across all communicators:

    rank 0   launched  a, b ──▶ a waits for rank 1 ┐
    rank 1   launched  b, c ──▶ b waits for rank 0 ┘ and so none ever runs

Under its rules a meeting runs when all its members have joined it and have none before it; a cycle of meetings that
wait for each other is refused as soon as it closes, through two groups or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quintsched.errors import MisfitError

from ..clocks import now_s
from ..transport_interface import ReduceOp, describe

GroupKey = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MemberCall:
    """A collective as a member issues it: kind with operation or source, and tensor; must be the same for all.

    Only an all-to-all may differ in its rows: the counts for each member, and from each.
    """

    kind: str
    detail: ReduceOp | int | None
    tensor: Tensor
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()

    def fits(self, other: MemberCall) -> bool:
        """Whether these two can be the same collective."""
        mine, theirs, since = self.tensor, other.tensor, 1 if self.sent else 0
        return (
            self.kind == other.kind
            and self.detail == other.detail
            and len(self.sent) == len(other.sent)
            and mine.shape[since:] == theirs.shape[since:]
            and mine.dtype == theirs.dtype
        )

    def __str__(self) -> str:
        detail = self.detail.value if isinstance(self.detail, ReduceOp) else self.detail
        return " ".join(str(word) for word in (self.kind, detail, describe(self.tensor)) if word is not None)


Distribute = Callable[[list[MemberCall]], Sequence[Tensor]]
"""Maps the collectives of all members to the result of each."""


@dataclass(slots=True, eq=False)
class Meeting:
    """The `number`-th collective of a group: the members' tensors, and their outputs.

    `after` has, per member, the meeting that must run before this one; `then`, the one after it.
    """

    group: GroupKey
    number: int
    first: tuple[int, MemberCall]
    distribute: Distribute
    brought: dict[int, tuple[MemberCall, Tensor]] = field(default_factory=dict)
    after: dict[int, Meeting] = field(default_factory=dict)
    then: dict[int, Meeting] = field(default_factory=dict)
    arrival_s: float | None = None

    def hold(self, arrival_s: float) -> None:
        """Compute the results of all members, and write them to their outputs; they arrive at a time of `now_s`."""
        collectives, outputs = zip(*map(self.brought.__getitem__, self.group[1]), strict=True)
        for output, result in zip(outputs, self.distribute(list(collectives)), strict=True):
            output.copy_(result)
        self.brought.clear()
        self.arrival_s = arrival_s

    def finish(self) -> None:
        """Do nothing: the last member to join wrote all results."""

    @property
    def name(self) -> str:
        """Its number and ranks, in words."""
        return f"collective {self.number} of ranks {list(self.group[1])}"

    def describe_to(self, rank: int) -> str:
        """Describe the collective, in words."""
        return f"{self.first[1]} with ranks {list(self.group[1])}, collective {self.number} of the group"


class Meetings:
    """All pending meetings of a world. Calls are made with the world's lock held.

    With `one_order`, the collectives of a rank run in the order in which it issued them; otherwise in order per group.
    A collective takes `collective_s` seconds after its start; a group runs one at a time.
    """

    def __init__(self, one_order: bool, collective_s: float) -> None:
        self._one_order, self._collective_s = one_order, collective_s
        self._free_s: dict[GroupKey, float] = {}
        self._open: dict[tuple[GroupKey, int], Meeting] = {}
        self._issued: defaultdict[int, dict[GroupKey, int]] = defaultdict(dict)
        self._latest: dict[int, Meeting] = {}

    @property
    def num_open(self) -> int:
        """Number of meetings that wait for a member."""
        return len(self._open)

    def enter(self, rank: int, group: GroupKey) -> None:
        """Register `rank` as a member of `group`."""
        self._issued[rank][group] = 0

    def join(
        self, rank: int, group: GroupKey, collective: MemberCall, output: Tensor, distribute: Distribute
    ) -> tuple[Meeting, list[Meeting]]:
        """Join the next meeting of the group; return it, and the meetings that can run now.

        Raises:
            MisfitError: the members issue different collectives, or those of several groups in a cycle.
        """
        issued = self._issued[rank]
        number = issued[group]
        meeting = self._open.get((group, number))
        if meeting is None:
            meeting = self._open[group, number] = Meeting(group, number, (rank, collective), distribute)
        other, expected = meeting.first
        if not collective.fits(expected):
            raise MisfitError(f"collective {number}: rank {other} issued {expected}, rank {rank} {collective}")
        if self._one_order:
            self._queue(rank, meeting)
        issued[group] = number + 1
        meeting.brought[rank] = (collective, output)
        is_complete = len(meeting.brought) == len(group[1]) and not meeting.after
        return meeting, self._hold(meeting) if is_complete else []

    def _queue(self, rank: int, meeting: Meeting) -> None:
        """Order a meeting after the latest pending one of the rank; raises `MisfitError` for a cycle."""
        latest, self._latest[rank] = self._latest.get(rank), meeting
        if latest is None or latest.arrival_s is not None:
            return
        meeting.after[rank], latest.then[rank] = latest, meeting
        if circle := _circle(meeting) if meeting.then else ():
            steps = [f"rank {step} issued {earlier.name} before {later.name}" for step, earlier, later in circle]
            raise MisfitError(f"{'; '.join(steps)}; NCCL wants one launch order on all ranks")

    def _hold(self, meeting: Meeting) -> list[Meeting]:
        """Run a complete meeting with none before it, and those that waited for it alone."""
        held = [meeting]
        for one in held:
            del self._open[one.group, one.number]
            one.hold(self._arrival_s(one.group) if self._collective_s else 0.0)
            for rank, following in one.then.items():
                del following.after[rank]
                if not following.after and len(following.brought) == len(following.group[1]):
                    held.append(following)
            one.then.clear()
        return held

    def _arrival_s(self, group: GroupKey) -> float:
        """Return the end of a collective that starts now, where collectives take time."""
        self._free_s[group] = max(now_s(), self._free_s.get(group, 0.0)) + self._collective_s
        return self._free_s[group]


def _circle(meeting: Meeting) -> Sequence[tuple[int, Meeting, Meeting]]:
    """Return the shortest cycle by which a meeting waits for itself, as (rank, earlier, later); () without one."""
    ways: dict[Meeting, list[tuple[int, Meeting, Meeting]]] = {meeting: []}
    reached = [meeting]
    for later in reached:
        for rank, earlier in later.after.items():
            if earlier is meeting:
                return [(rank, earlier, later), *ways[later]]
            if earlier not in ways:
                ways[earlier] = [(rank, earlier, later), *ways[later]]
                reached.append(earlier)
    return ()
