"""Export of a plan as a SPIN model, for a proof by an independent model checker.

    spin -search plan.pml      all interleavings: a deadlock is an invalid end state, other faults are failed assertions

Under `blocking` a rank is one process that runs its program in order, and asserts that needed values exist, that they
are made once, and that none are left over. Under the other transport profiles there is one process per queue. Each
waits for the values it needs, and for the rank's host to reach the instruction in program order: `passed` counts the
instructions that the host has waited for.

    proctype rank_0()                              proctype rank_1()
    SendAct  atomic { take(4); c0_1 ! 7 }   ───▶   RecvAct  atomic { c0_1 ? got; assert(got == 7); make(9) }

Channels are first-in-first-out, and the receiver asserts that it gets the expected message. With `buffer` 0 a send
waits for its receive (rendezvous), else a channel holds that many messages. Under `tagged`, messages match by name. The
data flow comes from `quintsched.ir.dataflow_analysis`; nothing is shared with the checker's proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import Template

from quintsched.errors import UnsoundError, UsageError, counted
from quintsched.graph.event_edges import ISSUED
from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.dataflow_analysis import Operands, flow, gatherings_of
from quintsched.ir.instruction_set import (
    AMONG_REPLICAS,
    LOANS,
    WHOLE_MESH,
    BwdWeight,
    Fwd,
    Instruction,
    Message,
    Send,
    SyncTied,
)
from quintsched.ir.instruction_values import AMBIENT, TRAVELS, Value, ValueKind
from quintsched.ir.plan_data import PlanData
from quintsched.ir.ragged import Ragged
from quintsched.verify.wellformed import malformations

MAX_PROCESSES = 255
"""Maximum number of processes in SPIN."""

MODEL_HEAD = Template("""\
/* $title
   transport profile $profile, $buffers; to judge it:
   spin -search FILE     or     spin -a FILE && gcc -DSAFETY -o pan pan.c && ./pan */

byte ended;                         /* processes */
bool here[$values], ever[$values];    /* values: stands now, was ever made */
short arrived[$groups], current[$groups];    /* collectives: members that came, what they came for */
short passed[$ranks];    /* what each rank's host has waited for */

inline make(x) { $make }
inline need(x) { $need }
inline take(x) { $take }
inline meet(group, what, members) {
  if
  :: arrived[group] % members == 0 -> current[group] = what
  :: else -> assert(current[group] == what)
  fi;
  arrived[group]++
}
""")

ASSERTED = {
    "make": "assert(!ever[x]); ever[x] = true; here[x] = true",
    "need": "assert(here[x])",
    "take": "assert(here[x]); here[x] = false",
}
AWAITED = {"make": "ever[x] = true", "need": "ever[x]", "take": "ever[x]"}


def to_promela(plan: PlanData, *, profile: str = "blocking", buffer: int = 0) -> str:
    """Return the SPIN model of a plan under a transport profile.

    `buffer` is the number of messages that a channel holds; 0 is a rendezvous. Raises `UsageError` for an unknown
    profile, a buffer below 0 or too many processes for SPIN, `UnsoundError` for inconsistent stages and routes.
    """
    find_profile(profile)
    if buffer < 0:
        raise UsageError(f"a channel cannot hold {buffer} messages; give 0 for a rendezvous, or more")
    faults = list(malformations(plan))
    if any(fault.rank is None for fault in faults):
        raise UnsoundError(f"not sound: {plan.title}\n{faults[0].message}")
    return _Model(plan, profile, buffer, {(fault.rank, fault.index) for fault in faults}).text()


@dataclass
class _Model:
    """Model of a plan while it is generated; channels, groups and collectives are numbered in order of appearance."""

    plan: PlanData
    profile: str
    buffer: int
    malformed: set[tuple[int | None, int | None]]
    channels: set[tuple[int, int]] = field(default_factory=set)
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    met: Counter[tuple[int, int]] = field(default_factory=Counter)
    names: dict[Value | Instruction, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return the text of the model; the processes are generated first, as they determine the declarations."""
        processes = self._processes()
        if len(processes) >= MAX_PROCESSES:
            raise UsageError(f"the model has {len(processes) + 1} processes; SPIN runs {MAX_PROCESSES} at most")
        head = MODEL_HEAD.substitute(
            ASSERTED if self.profile == "blocking" else AWAITED,
            title=" ".join(self.plan.title.replace("*/", "* /").split()),
            profile=self.profile,
            buffers=f"channels of {counted(self.buffer, 'message')}" if self.buffer else "every message a rendezvous",
            values=max(len(self._numbers), 1),
            groups=max(len(self.groups), 1),
            ranks=max(len(self.plan.programs), 1),
        )
        channels = [f"chan c{a}_{b} = [{self.buffer}] of {{ int }};" for a, b in sorted(self.channels)]
        values = [f"/* value {number}: {value}, on rank {rank} */" for (rank, value), number in self._numbers.items()]
        if self.profile == "blocking":
            processes = {name: [*steps, "ended++;"] for name, steps in processes.items()}
        bodies = [line for name, steps in processes.items() for line in (*_process(name, steps), "")]
        return "\n".join([head, *channels, "", *values, "", *bodies, *self._end(len(processes))]) + "\n"

    def _processes(self) -> dict[str, list[str]]:
        """Return the steps of each process by name, in program order."""
        found: dict[str, list[str]] = {}
        for rank, program in enumerate(self.plan.programs):
            waits = 0
            for index, i in enumerate(program):
                queue = self._queue(rank, i)
                if queue is not None:
                    step = self._hosted(rank, i, waits, self._step(rank, index, i))
                    found.setdefault(f"rank_{rank}{queue}", []).append(f"/* {index:3} {i} */ {step};")
                waits += not _is_issued(i)
        if self.profile == "tagged":
            found["network"] = self._network()
        return found

    def _queue(self, rank: int, i: Instruction) -> str | None:
        """Return the name of an instruction's queue on the rank; None for a message that no queue orders."""
        if self.profile == "blocking":
            return ""
        if i.queue:
            return f"_{i.queue}"
        members = self._members(i)
        if not members and not isinstance(i, (Message, *AMONG_REPLICAS)):
            return "_compute"
        if self.profile == "single-stream":
            return "_wire"
        if not isinstance(i, Message):
            if self.profile != "tagged":
                return "_launched"
            return f"_group_{'_'.join(map(str, members))}" if members else "_replicas"
        source, target = self._channel(rank, i)
        if self.profile == "pair-stream":
            source, target = sorted((source, target))
        if self.profile == "tagged":
            return "_loans" if isinstance(i, LOANS) else None
        return f"_wire_{source}_{target}"

    def _hosted(self, rank: int, i: Instruction, waits: int, step: str) -> str:
        """Return a step guarded by the position of the rank's host, which waits for `waits` instructions before it."""
        if self.profile == "blocking":
            return step
        if _is_issued(i):
            return f"passed[{rank}] >= {waits}; {step}"
        return f"passed[{rank}] == {waits}; {step}; passed[{rank}]++"

    @staticmethod
    def _channel(rank: int, i: Message) -> tuple[int, int]:
        return (rank, i.peer) if isinstance(i, Send) else (i.peer, rank)

    def _members(self, i: Instruction) -> tuple[int, ...]:
        """Return the pipeline ranks that meet at a collective; () for other instructions."""
        if isinstance(i, SyncTied):
            members = self.plan.layout.ranks_of(i.stages)
            return members if len(members) > 1 else ()
        return tuple(range(len(self.plan.programs))) if isinstance(i, WHOLE_MESH) else ()

    def _flow(self, rank: int, index: int, i: Instruction, gatherings: Sequence[int]) -> Operands | None:
        """Return the data flow of an instruction; None for a malformed one without a valid peer and value."""
        layout = self.plan.layout
        if (rank, index) not in self.malformed:
            return flow(i, layout, rank, *gatherings)
        if not isinstance(i, Message) or not 0 <= i.peer < len(self.plan.programs):
            return None
        known = 0 <= i.stage < len(self.plan.stage_to_pp) and layout.visits(i.stage, i.microbatch)
        found = flow(i, layout, rank) if known and layout.rank_of(i.stage) == rank else Operands()
        return found if found != Operands() else None

    @property
    def _gatherings(self) -> list[list[tuple[int, ...]]]:
        """Gatherings of its stages' weights that each instruction of each rank uses, by number."""
        columns, (apart, origin) = self.plan.columns, self.plan.columns.apart
        numbers = Ragged.group(origin, gatherings_of(apart), len(columns)).lists()
        return [numbers[rows.start : rows.stop] for rows in map(columns.rows_of, range(columns.num_ranks))]

    @cached_property
    def _flows(self) -> list[list[Operands | None]]:
        return [
            [self._flow(rank, index, i, gatherings) for index, (i, gatherings) in enumerate(zip(*both, strict=True))]
            for rank, both in enumerate(zip(self.plan.programs, self._gatherings, strict=True))
        ]

    @cached_property
    def _numbers(self) -> dict[tuple[int, Value], int]:
        """Number of each value of each rank that is produced or, where that is asserted, needed."""
        found: dict[tuple[int, Value], int] = {}
        for rank, flows in enumerate(self._flows):
            for used in filter(None, flows):
                needed = (*used.consumes, *used.reads, *used.follows) if self.profile == "blocking" else ()
                for value in (*used.produces, *needed):
                    found.setdefault((rank, value), len(found))
        return found

    def _name(self, thing: Value | Instruction) -> int:
        """Return the number by which the ends of a message, or the members of a collective, identify it."""
        return self.names.setdefault(thing, len(self.names) + 1)

    def _step(self, rank: int, index: int, i: Instruction) -> str:
        used = self._flows[rank][index]
        if used is None:
            return "assert(false)"
        needed = (*used.reads, *(used.follows if self.profile == "blocking" else ()))
        before = [*self._uses(rank, "need", needed), *self._uses(rank, "take", used.consumes)]
        after = self._uses(rank, "make", used.produces)
        members = self._members(i)
        if members:
            group = self.groups.setdefault(members, len(self.groups))
            self.met[rank, group] += 1
            meet = f"meet({group}, {self._name(i)}, {len(members)})"
            enough = f"arrived[{group}] >= {len(members) * self.met[rank, group]}"
            return f"{_atomic(*before, meet)}; {_atomic(enough, *after)}"
        if isinstance(i, Message):
            source, target = self._channel(rank, i)
            self.channels.add((source, target))
            name = self._name(_carried(i, used))
            if isinstance(i, Send):
                return _atomic(*before, f"c{source}_{target} ! {name}", *after)
            return _atomic(f"c{source}_{target} ? got", f"assert(got == {name})", *before, *after)
        return _atomic(*before, *after)

    def _uses(self, rank: int, word: str, values: tuple[Value, ...]) -> list[str]:
        numbers = [self._number(rank, value) for value in values]
        return [f"{word}({number})" for number in numbers if number is not None]

    def _number(self, rank: int, value: Value) -> int | None:
        """Return the number of a value on this rank, or on the rank that sends it; None if no instruction makes it."""
        elsewhere = self._travelling.get(value) if value.kind in TRAVELS else None
        return self._numbers.get((rank, value), elsewhere)

    @cached_property
    def _travelling(self) -> dict[Value, int]:
        """Number of each value that travels between ranks, on the rank that makes it first."""
        return {value: number for (_, value), number in reversed(self._numbers.items()) if value.kind in TRAVELS}

    def _network(self) -> list[str]:
        """Return the steps of a process that delivers each message once it is sent, in any order."""
        sent, received = self._ends(sends=True), self._ends(sends=False)
        steps = [f"bool sent[{len(sent) + 1}];", "short n;", "do"]
        for k, name in enumerate(name for name in sent if name in received):
            ready = " && ".join([f"!sent[{k}]", *(f"ever[{number}]" for number in sent[name])])
            made = (f"ever[{number}] = true" for number in received[name])
            steps.append(f":: {_atomic(ready, *made, f'sent[{k}] = true', 'n++')}")
        return [*steps, f":: n == {len(sent | received)} -> break", "od;"]

    def _ends(self, *, sends: bool) -> dict[tuple[object, ...], list[int]]:
        """Return the numbers of the values of the k-th send, or receive, of each name."""
        found: dict[tuple[object, ...], list[int]] = {}
        times: Counter[tuple[object, ...]] = Counter()
        for rank, program in enumerate(self.plan.programs):
            for i, used in zip(program, self._flows[rank], strict=True):
                if isinstance(i, Message) and isinstance(i, Send) == sends and not isinstance(i, LOANS):
                    values = (used.consumes if sends else used.produces) if used else ()
                    name = (*self._channel(rank, i), _carried(i, used) if used else i)
                    numbers = (self._number(rank, value) for value in values)
                    found[*name, times[name]] = [number for number in numbers if number is not None]
                    times[name] += 1
        return found

    def _end(self, num_processes: int) -> Iterator[str]:
        """Yield the assertions at the end: no values left over, all computations done."""
        if self.profile != "blocking":
            return
        yield "active proctype all_is_done() { atomic {"
        yield f"  ended == {num_processes};"
        for (_, value), number in self._numbers.items():
            if value.kind not in AMBIENT:
                yield f"  assert(!here[{number}]);"
        layout = self.plan.layout
        for stage in range(len(self.plan.stage_to_pp)):
            rank = layout.rank_of(stage)
            for microbatch in layout.microbatches_of(stage):
                owed = BwdWeight(stage, microbatch) if layout.trains else Fwd(stage, microbatch)
                for value in flow(owed, layout, rank).produces:
                    made = f"ever[{self._numbers[rank, value]}]" if (rank, value) in self._numbers else "false"
                    yield f"  assert({made});  /* {value} */"
        yield "} }"


def _carried(message: Message, used: Operands) -> Value:
    """Return the value that identifies a message on both of its ends."""
    if isinstance(message, LOANS):
        return Value(ValueKind.LENT, message.stage, message.microbatch)
    return (used.consumes or used.produces)[0]


def _is_issued(i: Instruction) -> bool:
    """Return whether a rank's host goes on before the instruction has ended."""
    return isinstance(i, ISSUED) and not isinstance(i, LOANS)


def _atomic(*statements: str) -> str:
    return f"atomic {{ {'; '.join(statements)} }}"


def _process(name: str, steps: list[str]) -> list[str]:
    return [f"active proctype {name}() {{", "  int got;", *(f"  {step}" for step in steps), "}"]
