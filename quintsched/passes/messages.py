"""Place every send together with its receive at one point of a single global order.

Each rank's program is that order with everything of the other ranks left out. So no cycle can arise, even where
every call blocks the host until its partner has come: the order itself is a run of the whole.

    global order   F0@0  (0→1: a0)  F1@0  F0@1  (0→1: a1)  …
    rank 0         F0    SendAct 0  F1          SendAct 1
    rank 1               RecvAct 0        F0    RecvAct 1

The order is that in which a simulated run at unit costs produces the messages, with at most two messages of a
channel received and not yet taken. Messages of a channel go in the order in which the receiver takes them: then
neither that limit nor the channel's order ever makes the run wait.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from operator import itemgetter

from quintsched.costs import Costs
from quintsched.dataflow import Flows, Kind, Value, flows_of
from quintsched.errors import UnsoundError
from quintsched.events import PROFILES, Run, build_graph, merge_events
from quintsched.grid import excerpt
from quintsched.instructions import Fwd, Instruction, RecvAct, RecvGrad, Send, SendAct, SendGrad
from quintsched.plan import Plan
from quintsched.simulator import event_durations

RECEIVES_OUTSTANDING = 2

Key = tuple[float, int, int, int, int]
Slot = tuple[Key, Instruction]
BEFORE, COMPUTE, AFTER = 0, 1, 2


@dataclass(frozen=True)
class _Crossing:
    """A value that is made on one rank and taken on another."""

    value: Value
    made_by: int
    taken_by: int
    taker: Instruction


def place_messages(plan: Plan) -> Plan:
    """Add sends and receives to a plan of computations; raises `UnsoundError` if these wait for each other."""
    flows = flows_of(plan.programs, plan.layout)
    events = merge_events(plan)
    graph = build_graph(plan, flows, PROFILES["channel"], events)
    durations = event_durations(plan, events, Costs())
    run = graph.run(durations)
    if not run.finished:
        raise UnsoundError(_explain_order(plan, flows, events.of, run))
    slots = _compute_slots(plan, events.of, run)
    for (source, target), crossings in _crossings(plan, flows, events.of).items():
        for key, crossing in zip(_order_keys(source, target, crossings, run, durations), crossings, strict=True):
            send, receive = _ends(crossing, source, target, plan)
            slots[source].append((key, send))
            slots[target].append((key, receive))
    return replace(plan, programs=tuple(_in_order(slots_of_rank) for slots_of_rank in slots))


def _in_order(slots: list[Slot]) -> tuple[Instruction, ...]:
    return tuple(instruction for _, instruction in sorted(slots, key=itemgetter(0)))


def _compute_slots(plan: Plan, of: list[list[int]], run: Run) -> list[list[Slot]]:
    return [
        [((run.start[of[rank][index]], COMPUTE, index, 0, 0), i) for index, i in enumerate(program)]
        for rank, program in enumerate(plan.programs)
    ]


def _crossings(plan: Plan, flows: Flows, of: list[list[int]]) -> dict[tuple[int, int], list[_Crossing]]:
    """Return per channel what crosses it, in the order in which the receiver takes it."""
    maker: dict[Value, tuple[int, int]] = {}
    for rank, flows_of_rank in enumerate(flows):
        for index, flow in enumerate(flows_of_rank):
            for value in flow.produces:
                maker[value] = (rank, of[rank][index])
    found: dict[tuple[int, int], list[_Crossing]] = defaultdict(list)
    for rank, flows_of_rank in enumerate(flows):
        for index, flow in enumerate(flows_of_rank):
            for value in flow.consumes:
                if value.kind in (Kind.OUTPUT, Kind.OUTPUT_GRAD) and value in maker:
                    source, event = maker[value]
                    if source != rank:
                        taker = plan.programs[rank][index]
                        found[source, rank].append(_Crossing(value, event, of[rank][index], taker))
    return found


def _order_keys(source: int, target: int, crossings: list[_Crossing], run: Run, durations: list[float]) -> list[Key]:
    """Return each message's place in the global order."""
    keys: list[Key] = []
    sent = 0.0
    for k, crossing in enumerate(crossings):
        made = max(sent, run.start[crossing.made_by] + durations[crossing.made_by])
        older = crossings[k - RECEIVES_OUTSTANDING] if k >= RECEIVES_OUTSTANDING else None
        freed = run.start[older.taken_by] if older else -1.0
        sent = max(made, freed)
        keys.append((sent, AFTER if freed == sent else BEFORE, source, target, k))
    return keys


def _ends(crossing: _Crossing, source: int, target: int, plan: Plan) -> tuple[Send, Instruction]:
    value, layout = crossing.value, plan.layout
    after = layout.after(value.stage, value.number)
    if isinstance(crossing.taker, Fwd):
        return SendAct(value.stage, value.number, target), RecvAct(after, value.number, source)
    return SendGrad(after, value.number, target), RecvGrad(value.stage, value.number, source)


def _explain_order(plan: Plan, flows: Flows, of: list[list[int]], run: Run) -> str:
    """Name what each rank is stuck at, the first computation of it that never begins, and what that waits for."""
    maker = {
        value: f"rank {rank} makes it at {index} {plan.programs[rank][index]}"
        for rank, flows_of_rank in enumerate(flows)
        for index, flow in enumerate(flows_of_rank)
        if run.waiting[of[rank][index]]
        for value in flow.produces
    }
    stuck, lines = [], []
    for rank, numbers in enumerate(of):
        index = next((index for index, event in enumerate(numbers) if run.waiting[event]), None)
        if index is not None:
            stuck.append((rank, index))
            needed = (f"{value}; {maker[value]}" for value in flows[rank][index].consumes if value in maker)
            lines.append(f"rank {rank} is stuck at {index} {plan.programs[rank][index]}: it needs {next(needed)}")
    head = f"not sound: {plan.title}\ndeadlock: the order of computation itself cannot run"
    return "\n".join([head, *lines, *excerpt(plan, stuck)])
