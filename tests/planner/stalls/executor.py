"""A run as the runtime does it, without tensors: ranks, messages and collectives in simulated time, with one fault.

    place i of a program     post the receives that are due, issue the sends that are due, then run the instruction,
                             which waits for what it takes, for its stage's replicas, for sends that have to be done

Sends block nobody; they are done when the receive is posted. With `ahead`, messages are issued before their places.
"""

import bisect
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.instruction_set import ClipGrad, Instruction, Message, OnBucket, Recv, Send
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
Place = tuple[int, int, int | None]
"""A rank, its step, and its place in the program, if it is in the step."""


class Execution:
    """Runs `steps` steps of a plan to their end, or to a standstill."""

    def __init__(self, plan: Plan, fault: Fault, *, steps: int = 3, ahead: bool = True, seed: int = 0) -> None:
        self.plan, self.fault, self.steps = plan, fault, steps
        self.mesh, self.partners = plan.mesh, Partners(plan)
        self._world = tuple(range(self.mesh.size))
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
        posts, issues, releases = ([defaultdict[int, list[int]](list) for _ in range(pp)] for _ in range(3))
        for rank in range(pp):
            for firsts, lifetimes in ((posts, receive_lifetimes), (issues, send_lifetimes)):
                rows = lifetimes(self.plan, rule).of_rank(columns, rank)
                for index, first, last in zip(*map(list, (rows.rows, rows.first, rows.last)), strict=True):
                    firsts[rank][first].append(int(index))
                    if firsts is issues:
                        releases[rank][last + 1].append(int(index))
        return posts, issues, releases

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

    def _say(self, at: Place, awaits: BlockingCall) -> None:
        said = self.said[at[0]]
        if not said.entries or said.entries[-1] != (*at[1:], awaits):
            said.times.append(self.now)
            said.entries.append((*at[1:], awaits))

    def _rank(self, rank: int) -> Iterator[Action]:
        pp_rank = self.mesh.pp_rank(rank)
        outstanding: set[int] = set()
        for step in range(1, self.steps + 1):
            yield from self._meet((rank, step - 1, None), self._world, ("header", step))
            yield from self._release((rank, step - 1, None), outstanding, outstanding)
            for index, instruction in enumerate(self.plan.programs[pp_rank]):
                at = rank, step, index
                self._say(at, NOTHING)
                if self.fault == Fault("freeze", *at):
                    yield "freeze", None
                for receive in self._receives[pp_rank][index]:
                    if self.fault != Fault("skip", rank, step, receive):
                        self._posted.add((rank, step, receive))
                yield from self._release(at, outstanding, self._releases[pp_rank][index])
                for send in self._sends[pp_rank][index]:
                    if self.fault != Fault("skip", rank, step, send):
                        self._issued.add((rank, step, send))
                        outstanding.add(send)
                if not isinstance(instruction, Message):
                    yield from self._instruction(at, instruction)
            self._say((rank, step, None), NOTHING)

    def _instruction(self, at: Place, instruction: Instruction) -> Iterator[Action]:
        rank, step, index = at
        pp_rank = self.mesh.pp_rank(rank)
        for receive in self.partners.received_by(pp_rank, index):
            if self.fault != Fault("skip", rank, step, receive):
                sent = self._other(rank, step, receive)
                yield from self._wait(at, BlockingCall("receive", receive), lambda sent=sent: sent in self._issued)
        axes = self.partners.group_axes(instruction)
        if isinstance(instruction, OnBucket):
            group = self._group(rank, instruction.axes)
            self._met["bucket", step, instruction, pp_rank, group].add(rank)
        if isinstance(instruction, ClipGrad):
            for one in self.plan.programs[pp_rank][:index]:
                if isinstance(one, OnBucket):
                    group = self._group(rank, one.axes)
                    yield from self._gather(at, group, ("bucket", step, one, pp_rank, group))
            yield from self._meet(at, self._world, ("norm", step))
        elif instruction.computes and axes and len(group := self._group(rank, axes)) > 1:
            yield "compute", self.random.uniform(0.01, 0.1)
            yield from self._meet(at, group, ("inside", step, index))
        yield "compute", self.random.uniform(0.01, 0.2)

    def _group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        return next(group for group in self.mesh.groups(*axes) if rank in group)

    def _gather(self, at: Place, group: tuple[int, ...], key: tuple[object, ...]) -> Iterator[Action]:
        if len(group) > 1:
            awaits = BlockingCall("collective", ranks=group)
            yield from self._wait(at, awaits, lambda: self._met[key] >= set(group))

    def _meet(self, at: Place, group: tuple[int, ...], key: tuple[object, ...]) -> Iterator[Action]:
        self._met[*key, group].add(at[0])
        yield from self._gather(at, group, (*key, group))

    def _release(self, at: Place, outstanding: set[int], sends: set[int] | list[int]) -> Iterator[Action]:
        for send in sorted(outstanding & {*sends}):
            posted = self._other(*at[:2], send)
            yield from self._wait(at, BlockingCall("send", send), lambda posted=posted: posted in self._posted)
            outstanding.discard(send)

    def _wait(self, at: Place, awaits: BlockingCall, ready: Callable[[], bool]) -> Iterator[Action]:
        if not ready():
            self._say(at, awaits)
            yield "wait", ready
            self._say(at, NOTHING)

    def _other(self, rank: int, step: int, index: int) -> tuple[int, int, int]:
        """Return the rank, step and place of a message's other end."""
        pp_rank, place = self.partners.partner(self.mesh.pp_rank(rank), index)
        return self.mesh.rank(self.mesh.coordinates(rank) | {"pp": pp_rank}), step, place

    def states(self, at: float, heard: list[float], *, says_waits: bool = True) -> list[RankState]:
        """Return what the ranks have said up to the time `at`, each last heard of `heard[rank]` seconds before it."""
        found = []
        for rank, said in enumerate(self.said):
            place = bisect.bisect_right(said.times, at - heard[rank]) - 1
            since, (run, index, awaits) = 0.0, (0, None, NOTHING)
            if place >= 0:
                since, (run, index, awaits) = said.times[place], said.entries[place]
            step = run + (index is None and awaits != NOTHING) or None
            waits, mode = awaits if says_waits else None, self.plan.mode
            state = RankState(
                rank, "a", 100 + rank, "step", step, mode, index, at - since, heard[rank], None, waits, run
            )
            found.append(state)
        return found


def faults_of(plan: Plan, rng: random.Random, kind: FaultKind) -> Fault:
    """Return a random fault of a kind."""
    rank = rng.randrange(plan.mesh.size)
    program = plan.programs[plan.mesh.pp_rank(rank)]
    places = [i for i, one in enumerate(program) if kind == "freeze" or isinstance(one, Send | Recv)]
    return Fault(kind, rank, rng.choice((1, 2)), rng.choice(places))
