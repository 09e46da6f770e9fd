"""Trace events of a simulation, and of measured steps beside it, for Perfetto and chrome://tracing.

    process "planned"            a thread per rank and queue:  rank 0 [F0][F1]…   rank 0, to rank 1 [F0][F1]…
    process "measured, step 2"   [wait|F0][F1&B0]…  a wait is within its instruction; copies to host memory apart
                                 ╲▶                 a flow ("s", "f") from each message to its consumer
                                 ▂▃▅▃▂              counters ("C"): activations of a rank, messages on the wire
    processes of torch.profiler  its own events, on the same clock

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
Perfetto reads it in nanoseconds, drops slices that overlap without nesting, flows at a time without a slice, and
confuses threads of one number in two processes: so times are whole nanoseconds, a queue whose slices overlap gets
more threads, flows begin within a slice, and no two threads have one number. No matplotlib here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from quintsched.errors import UsageError
from quintsched.files.atomic import write_whole
from quintsched.ir.instruction_set import AMONG_REPLICAS, HostCopy, Instruction, Recv, Send, short
from quintsched.ir.instruction_values import Value, ValueKind
from quintsched.simulation.costs import Costs
from quintsched.simulation.held_activations import flows_of_ranks, held_activations
from quintsched.simulation.instruction_durations import loan_sizes
from quintsched.simulation.simulator import Simulation, Span
from quintsched.trace.measured_costs import UNITS
from quintsched.trace.measured_trace import MeasuredStep

from .timeline_objects import arrivals_of

Event: TypeAlias = dict[str, object]
Run: TypeAlias = Simulation | MeasuredStep

FORWARD_US = 1000.0
"""Microseconds of a forward, if that is the unit of time."""
COMPRESSED = ".gz"


def save_events(
    simulation: Simulation,
    steps: Sequence[MeasuredStep],
    path: Path,
    profiles: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a file of trace events, compressed if its name ends in `.gz`.

    `profiles` are traces of torch.profiler, by name, on the clock of the first step. Raises `UsageError` for profiles
    without a step, and for a file that cannot be written.
    """
    if profiles and not steps:
        raise UsageError("traces of torch.profiler are placed by the clock of a measured step; none is given")
    writer = _EventWriter()
    _add_run(writer, simulation, "planned", simulation.costs)
    for step in steps:
        _add_run(writer, step, f"measured, step {step.number}", simulation.costs, _us(step.began_s - steps[0].began_s))
    for name, profile in (profiles or {}).items():
        _add_profile(writer, profile, name, steps[0].began_s * 1e6)
    planned = {"makespan": simulation.makespan, "bubble": simulation.bubble, "unit": simulation.unit}
    measured = {} if not steps else {"measured": [step.summary() for step in steps]}
    _begin_at_zero(writer.events)
    data = {
        "traceEvents": writer.events,
        "displayTimeUnit": "ms",
        "otherData": {"plan": simulation.plan.title, "planned": planned, **measured},
    }
    text = json.dumps(data, allow_nan=False).encode()
    write_whole(path, gzip.compress(text, mtime=0) if path.suffix == COMPRESSED else text, "the picture")


def _begin_at_zero(events: list[Event]) -> None:
    """Move all events so that none is before 0: a profiler may begin before the step."""
    least = min((event["ts"] for event in events if "ts" in event), default=0.0)  # type: ignore[type-var]
    if least < 0:  # type: ignore[operator]
        for event in events:
            if "ts" in event:
                event["ts"] = round(event["ts"] - least, 3)  # type: ignore[operator]


def _us(seconds: float) -> float:
    return seconds * UNITS["us"] / UNITS["s"]


@dataclass(frozen=True)
class _Slice:
    """Slice of a thread, in nanoseconds."""

    start: int
    end: int
    name: str
    category: str
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass
class _EventWriter:
    """Collects events; hands out the numbers of processes, threads and flows. 0 is the idle process of Perfetto."""

    events: list[Event] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    flows: Iterator[int] = field(default_factory=lambda: count(1))

    def process(self, name: str) -> int:
        """Begin a process; return its number."""
        return self._named("process", next(self.numbers), None, name)

    def thread(self, pid: int, name: str) -> int:
        """Begin a thread; return its number."""
        return self._named("thread", pid, next(self.numbers), name)

    def _named(self, kind: str, pid: int, tid: int | None, name: str) -> int:
        number, place = (pid, {"pid": pid}) if tid is None else (tid, {"pid": pid, "tid": tid})
        for key, value in (("name", name), ("sort_index", number)):
            self.events.append({"ph": "M", "name": f"{kind}_{key}", **place, "args": {key: value}})
        return number

    def slices(self, pid: int, name: str, slices: Sequence[_Slice]) -> list[int]:
        """Write a queue's slices; return the thread of each. Those that overlap without nesting get more threads."""
        lanes: list[tuple[int, list[_Slice]]] = []
        threads = [0] * len(slices)
        for index in sorted(range(len(slices)), key=lambda k: (slices[k].start, -slices[k].end)):
            one = slices[index]
            lane = next((lane for lane in lanes if _nests(lane[1], one)), None)
            if lane is None:
                lane = self.thread(pid, f"{name} ({len(lanes) + 1})" if lanes else name), []
                lanes.append(lane)
            lane[1].append(one)
            threads[index] = tid = lane[0]
            times = {"ts": one.start / 1e3, "dur": (one.end - one.start) / 1e3}
            self.events.append(
                {"ph": "X", "name": one.name, "cat": one.category, "pid": pid, "tid": tid, **times}
                | ({"args": dict(one.arguments)} if one.arguments else {})
            )
        return threads

    def flow(self, pid: int, name: str, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Write a flow from a thread and a time to others."""
        event: Event = {"name": name, "cat": "message", "id": next(self.flows), "pid": pid}
        self.events.append(event | {"ph": "s", "tid": source[0], "ts": source[1] / 1e3})
        self.events.append(event | {"ph": "f", "bp": "e", "tid": target[0], "ts": target[1] / 1e3})

    def counter(self, pid: int, name: str, unit: str, values: Iterable[tuple[int, float]]) -> None:
        """Write the values of a counter from these times on."""
        for time, value in values:
            self.events.append({"ph": "C", "name": name, "pid": pid, "ts": time / 1e3, "args": {unit: value}})


def _nests(opened: list[_Slice], one: _Slice) -> bool:
    """Whether a slice follows all that are open, or lies within them; closes those that it follows."""
    while opened and opened[-1].end <= one.start:
        opened.pop()
    return not opened or one.end <= opened[-1].end


def _add_run(writer: _EventWriter, run: Run, name: str, costs: Costs, after_us: float = 0.0) -> None:
    scale = UNITS["us"] / UNITS[run.unit] if run.unit in UNITS else FORWARD_US

    def nanoseconds(time: float) -> int:
        return round((time * scale + after_us) * 1e3)

    pid, several = writer.process(name), len(run.plan.stage_to_pp) > run.plan.mesh.pp
    threads: list[list[int]] = []
    for rank, row in enumerate(run.timeline):
        queues: dict[str, list[int]] = {f"rank {rank}": []}
        for place, span in enumerate(row):
            if not isinstance(span.instruction, Recv):
                queues.setdefault(_queue(rank, span.instruction), []).append(place)
        of_rank = [0] * len(row)
        for queue, places in queues.items():
            slices = [list(_slices(row[place], nanoseconds, several)) for place in places]
            found = iter(writer.slices(pid, queue, [one for both in slices for one in both]))
            for place, both in zip(places, slices, strict=True):
                of_rank[place], *_ = (next(found) for _ in both)
        threads.append(of_rank)
    _add_flows(writer, run, pid, threads, nanoseconds)
    for held in held_activations(run, costs):
        values = zip(map(nanoseconds, held.times), held.amounts, strict=True)
        writer.counter(pid, f"activations of rank {held.rank}", "microbatches", values)
    writer.counter(pid, "messages on the wire", "size", _on_the_wire(run, costs, nanoseconds))


def _queue(rank: int, i: Instruction) -> str:
    """Return the name of the queue of a rank that an instruction runs in."""
    match i:
        case Send():
            return f"rank {rank}, to rank {i.peer}"
        case HostCopy():
            return f"rank {rank}, host"
        case _ if isinstance(i, AMONG_REPLICAS):
            return f"rank {rank}, replicas"
    return f"rank {rank}"


def _slices(span: Span, nanoseconds: Callable[[float], int], several: bool) -> Iterator[_Slice]:
    i = span.instruction
    start, end = nanoseconds(span.start), nanoseconds(span.end)
    arguments = {one.name: getattr(i, one.name) for one in fields(i)}
    yield _Slice(start, end, short(i, with_stage=several), i.op, arguments)
    if span.runs > span.start:
        yield _Slice(start, min(nanoseconds(span.runs), end), "wait", "wait")


_CARGO = {
    ValueKind.OUTPUT: "activation",
    ValueKind.OUTPUT_GRAD: "gradient",
    ValueKind.SKIP: "skip",
    ValueKind.SKIP_GRAD: "gradient of a skip",
}
"""Names of flows."""


def _add_flows(
    writer: _EventWriter, run: Run, pid: int, threads: list[list[int]], nanoseconds: Callable[[float], int]
) -> None:
    """Write a flow from each message to the computation that consumes it.

    It begins with the message, or, where that takes no time, at the end of the computation before it.
    """
    flows, takers = flows_of_ranks(run), _takers(run)
    for rank, row in enumerate(run.timeline):
        source = (0, 0)
        for place, (span, used) in enumerate(zip(row, flows[rank], strict=True)):
            start, end = nanoseconds(span.start), nanoseconds(span.end)
            if span.instruction.computes:
                source = threads[rank][place], max(end - 1, start)
            elif isinstance(span.instruction, Send):
                value = used.consumes[0]
                if (taken := takers.get((span.instruction.peer, value))) is not None:
                    begins = (threads[rank][place], start) if end > start else source
                    target = threads[span.instruction.peer][taken[0]], max(nanoseconds(taken[1]), begins[1])
                    writer.flow(pid, _CARGO[value.kind], begins, target)


def _takers(run: Run) -> dict[tuple[int, Value], tuple[int, float]]:
    """Return, per rank and value, the place of the computation that consumes it, and the time at which it runs."""
    return {
        (rank, value): (place, span.runs)
        for rank, (row, flows) in enumerate(zip(run.timeline, flows_of_ranks(run), strict=True))
        for place, (span, used) in enumerate(zip(row, flows, strict=True))
        if span.instruction.computes
        for value in used.consumes
    }


def _on_the_wire(run: Run, costs: Costs, nanoseconds: Callable[[float], int]) -> Iterator[tuple[int, float]]:
    """Yield the size of all messages on their way, from each time on at which it changes."""
    arrivals, sent = arrivals_of(run), list[tuple[Value, float, float]]()
    for row, flows in zip(run.timeline, flows_of_ranks(run), strict=True):
        for span, used in zip(row, flows, strict=True):
            if isinstance(span.instruction, Send):
                value = used.consumes[0]
                sent.append((value, span.start, max(arrivals.get(value, span.end), span.start)))
    if not sent:
        return
    stages, units = (np.array([getattr(value, name) for value, _, _ in sent]) for name in ("stage", "number"))
    lent = np.array([value.kind in (ValueKind.SAVED, ValueKind.LENT) for value, _, _ in sent])
    alike = costs.message_sizes(stages, units, run.plan.schedule)
    sizes = np.where(lent, loan_sizes(run.plan, costs, stages, units), alike).tolist()
    changes: dict[int, float] = {}
    for (_, start, end), size in zip(sent, sizes, strict=True):
        for time, change in ((nanoseconds(start), size), (nanoseconds(end), -size)):
            changes[time] = changes.get(time, 0.0) + change
    total = 0.0
    for time in sorted(changes):
        total += changes[time]
        yield time, round(total, 9)


def _add_profile(writer: _EventWriter, profile: Mapping[str, Any], name: str, origin_us: float) -> None:
    """Write the slices and flows of torch.profiler on the clock of the origin, under numbers of their own."""
    shift_us = float(profile.get("baseTimeNanoseconds", 0)) / 1e3 - origin_us
    events = [event for event in profile["traceEvents"] if isinstance(event, dict)]
    titles = {(e["name"], e.get("pid"), e.get("tid")): e["args"].get("name") for e in events if e.get("ph") == "M"}
    pids, queues = dict[Any, int](), dict[tuple[Any, Any], list[Event]]()
    for event in events:
        if event.get("ph") == "X" and "ts" in event:
            queues.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    first: dict[tuple[Any, Any], int] = {}
    for (pid, tid), found in queues.items():
        if pid not in pids:
            title = next((text for (kind, of, _), text in titles.items() if (kind, of) == ("process_name", pid)), pid)
            pids[pid] = writer.process(f"{name}: {title}")
        slices = [_profiled(event, shift_us) for event in found]
        threads = writer.slices(pids[pid], str(titles.get(("thread_name", pid, tid), tid)), slices)
        first[pid, tid] = threads[0]
    ids = dict[Any, int]()
    for event in events:
        where = event.get("pid"), event.get("tid")
        if event.get("ph") in ("s", "t", "f") and where in first:
            number = ids.setdefault((event.get("cat"), event.get("id")), next(writer.flows))
            moved = {"pid": pids[where[0]], "tid": first[where], "ts": _moved(event["ts"], shift_us) / 1e3}
            writer.events.append({**event, **moved, "id": number})


def _profiled(event: Mapping[str, Any], shift_us: float) -> _Slice:
    start = _moved(event["ts"], shift_us)
    end = max(_moved(float(event["ts"]) + float(event.get("dur", 0.0)), shift_us), start)
    return _Slice(start, end, str(event.get("name", "")), str(event.get("cat", "")), event.get("args", {}))


def _moved(time_us: float, shift_us: float) -> int:
    """Return a time of the profiler from the origin on, in nanoseconds."""
    return round((float(time_us) + shift_us) * 1e3)
