"""A run as the runtime does it, without tensors: ranks, messages and collectives in simulated time, with one fault.

    place i of a program     post the receives that are due, issue the sends that are due, then run the instruction,
                             which waits for what it takes, for its stage's replicas, for sends that have to be done

Sends block nobody; they are done when the receive is posted. With `ahead`, messages are issued before their places, as
where tags match them. What each rank says is written down with the time, and can be asked for at any time.
"""

import bisect
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.instruction_set import ClipGrad, Message, OnBucket, Recv, Send
from quintsched.plan import Plan
from quintsched.simulation.message_slots import MessageRule, receive_lifetimes, send_lifetimes
from quintsched.stalls.last_reported_rank_states import BlockingCall, RankState
from quintsched.stalls.partner_instructions import Partners

FaultKind = Literal["freeze", "skip", "none"]
NOTHING = BlockingCall("nothing")


@dataclass(frozen=True)
class Fault:
    """Injected fault: a rank freezes at an instruction, or skips a message."""

    kind: FaultKind
    rank: int
    step: int
    index: int


@dataclass
class _Said:
    """Reports of a rank, with their times."""

    times: list[float] = field(default_factory=list)
    entries: list[tuple[int, int | None, BlockingCall]] = field(default_factory=list)


Action = tuple[str, object]


class Execution:
    """Runs `steps` steps of a plan to their end, or to a standstill."""

    def __init__(self, plan: Plan, fault: Fault, *, steps: int = 3, ahead: bool = True, seed: int = 0) -> None:
        self.plan, self.fault, self.steps = plan, fault, steps
        self.mesh, self.partners = plan.mesh, Partners(plan)
        self.random = random.Random(seed)
        rule = MessageRule.from_profile(find_profile("tagged" if ahead else "channel"), may_wait=True)
        self._receives, self._sends, self._releases = self._messages(rule)
        self._issued: set[tuple[int, int, int]] = set()
        self._posted: set[tuple[int, int, int]] = set()
        self._met: dict[tuple[object, ...], set[int]] = defaultdict(set)
        self.said = [_Said() for _ in range(self.mesh.size)]
        self.now = 0.0
        self.finished = self._run()

    def _messages(self, rule: MessageRule) -> tuple[list[dict[int, list[int]]], ...]:
        """Return per pp rank, by place: receives to post, sends to issue, sends to release."""
        columns, pp = self.plan.columns, self.mesh.pp
        found = tuple([defaultdict[int, list[int]](list) for _ in range(pp)] for _ in range(3))
        for rank in range(pp):
            rows = receive_lifetimes(self.plan, rule).of_rank(columns, rank)
            for index, first in zip(rows.rows.tolist(), rows.first.tolist(), strict=True):
                found[0][rank][first].append(index)
            rows = send_lifetimes(self.plan, rule).of_rank(columns, rank)
            for index, first, last in zip(rows.rows.tolist(), rows.first.tolist(), rows.last.tolist(), strict=True):
                found[1][rank][first].append(index)
                found[2][rank][last + 1].append(index)
        return found

    def _run(self) -> bool:
        """Run all ranks; return whether they came to their ends."""
        going = {rank: self._rank(rank) for rank in range(self.mesh.size)}
        due: list[tuple[float, int]] = [(0.0, rank) for rank in going]
        waiting: dict[int, Callable[[], bool]] = {}
        while due:
            due.sort()
            self.now, rank = due.pop(0)
            for action, what in going[rank]:
                if action == "compute":
                    due.append((self.now + float(what), rank))  # type: ignore[arg-type]
                    break
                if action == "freeze":
                    break
                assert callable(what)
                if not what():
                    waiting[rank] = what
                    break
            else:
                del going[rank]
            for other in [other for other, ready in waiting.items() if ready()]:
                del waiting[other]
                due.append((self.now + 1e-6, other))
        return not going

    def _say(self, rank: int, run: int, index: int | None, awaits: BlockingCall) -> None:
        said = self.said[rank]
        if not said.entries or said.entries[-1] != (run, index, awaits):
            said.times.append(self.now)
            said.entries.append((run, index, awaits))

    def _rank(self, rank: int) -> Iterator[Action]:
        mesh, where = self.mesh, self.mesh.coordinates(rank)
        pp_rank = where.get("pp", 0)
        program = self.plan.programs[pp_rank]
        world = tuple(range(mesh.size))
        outstanding: set[int] = set()
        for step in range(1, self.steps + 1):
            yield from self._meet(rank, step - 1, None, world, ("header", step))
            yield from self._release(rank, step - 1, None, outstanding, outstanding)
            for index, instruction in enumerate(program):
                self._say(rank, step, index, NOTHING)
                if self.fault == Fault("freeze", rank, step, index):
                    yield "freeze", None
                for receive in self._receives[pp_rank][index]:
                    if self.fault != Fault("skip", rank, step, receive):
                        self._posted.add((rank, step, receive))
                yield from self._release(rank, step, index, outstanding, self._releases[pp_rank][index])
                for send in self._sends[pp_rank][index]:
                    if self.fault != Fault("skip", rank, step, send):
                        self._issued.add((rank, step, send))
                        outstanding.add(send)
                if not isinstance(instruction, Message):
                    yield from self._instruction(rank, step, index, outstanding)
            self._say(rank, step, None, NOTHING)

    def _instruction(self, rank: int, step: int, index: int, outstanding: set[int]) -> Iterator[Action]:
        mesh, where = self.mesh, self.mesh.coordinates(rank)
        pp_rank = where.get("pp", 0)
        instruction = self.plan.programs[pp_rank][index]
        for receive in self.partners.received_by(pp_rank, index):
            if self.fault == Fault("skip", rank, step, receive):
                continue
            source = self._other(rank, receive)
            yield from self._wait(
                rank,
                step,
                index,
                BlockingCall("receive", receive),
                lambda key=(source[0], step, source[1]): key in self._issued,
            )
        if isinstance(instruction, OnBucket):
            self._bring(rank, ("bucket", step, instruction, pp_rank), index)
        axes = self.partners.group_axes(instruction)
        if isinstance(instruction, ClipGrad):
            for number, one in enumerate(self.plan.programs[pp_rank][:index]):
                if isinstance(one, OnBucket):
                    group = self._group(rank, one.axes)
                    yield from self._gather(rank, step, index, group, ("bucket", step, one, pp_rank, group), number)
            yield from self._meet(rank, step, index, tuple(range(mesh.size)), ("norm", step))
        elif instruction.computes and axes:
            group = self._group(rank, axes)
            if len(group) > 1:
                yield "compute", self.random.uniform(0.01, 0.1)
                yield from self._meet(rank, step, index, group, ("inside", step, index))
        yield "compute", self.random.uniform(0.01, 0.2)

    def _group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        return next(group for group in self.mesh.groups(*axes) if rank in group)

    def _bring(self, rank: int, key: tuple[object, ...], index: int) -> None:
        instruction = self.plan.programs[self.mesh.pp_rank(rank)][index]
        assert isinstance(instruction, OnBucket)
        self._met[*key, self._group(rank, instruction.axes)].add(rank)

    def _gather(
        self, rank: int, step: int, index: int | None, group: tuple[int, ...], key: tuple[object, ...], number: int
    ) -> Iterator[Action]:
        if len(group) > 1:
            yield from self._wait(
                rank, step, index, BlockingCall("collective", ranks=group), lambda: self._met[key] >= set(group)
            )

    def _meet(
        self, rank: int, step: int, index: int | None, group: tuple[int, ...], key: tuple[object, ...]
    ) -> Iterator[Action]:
        self._met[*key, group].add(rank)
        yield from self._gather(rank, step, index, group, (*key, group), 0)

    def _release(
        self, rank: int, step: int, index: int | None, outstanding: set[int], sends: set[int] | list[int]
    ) -> Iterator[Action]:
        for send in sorted(sends):
            if send not in outstanding:
                continue
            target = self._other(rank, send)
            yield from self._wait(
                rank,
                step,
                index,
                BlockingCall("send", send),
                lambda key=(target[0], step, target[1]): key in self._posted,
            )
            outstanding.discard(send)

    def _wait(
        self, rank: int, step: int, index: int | None, awaits: BlockingCall, ready: Callable[[], bool]
    ) -> Iterator[Action]:
        if not ready():
            self._say(rank, step, index, awaits)
            yield "wait", ready
            self._say(rank, step, index, NOTHING)

    def _other(self, rank: int, index: int) -> tuple[int, int]:
        where = self.mesh.coordinates(rank)
        found = self.partners.partner(where.get("pp", 0), index)
        assert found is not None
        return self.mesh.rank(where | {"pp": found[0]}), found[1]

    def states(self, at: float, heard: list[float], *, says_waits: bool = True) -> list[RankState]:
        """Return what the ranks have said up to the time `at`, each last heard of `heard[rank]` seconds before it."""
        found = []
        for rank, said in enumerate(self.said):
            place = bisect.bisect_right(said.times, at - heard[rank]) - 1
            since, (run, index, awaits) = (
                (0.0, (0, None, NOTHING))
                if place < 0
                else (
                    said.times[place],
                    said.entries[place],
                )
            )
            found.append(
                RankState(
                    rank=rank,
                    host="a",
                    pid=100 + rank,
                    phase="step",
                    step=run + (index is None and awaits != NOTHING) or None,
                    program=self.plan.mode,
                    index=index,
                    since_s=at - since,
                    heard_s=heard[rank],
                    awaits=awaits if says_waits else None,
                    run=run,
                )
            )
        return found


def faults_of(plan: Plan, rng: random.Random, kind: FaultKind) -> Fault:
    """Return a random fault of a kind."""
    rank = rng.randrange(plan.mesh.size)
    program = plan.programs[plan.mesh.pp_rank(rank)]
    places = [i for i, one in enumerate(program) if kind == "freeze" or isinstance(one, Send | Recv)]
    return Fault(kind, rank, rng.choice((1, 2)), rng.choice(places))
