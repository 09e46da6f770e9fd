"""Trace events of a simulation, and of a measured step beside it, for Perfetto and chrome://tracing.

    process 0 "planned"    thread per pp rank   [F0][F1]…         complete events ("X"), microseconds
    process 1 "measured"   thread per pp rank   [wait|F0][F1&B0]…    a wait lies within its instruction
                           and one for its copies to host memory and back, if there are any
                                 ╲▶                               a flow ("s", "f") from each send to its consumer

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
No matplotlib here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TypeAlias

from quintsched.files.atomic import write_whole
from quintsched.ir.instruction_set import HostCopy, Recv, Send, short
from quintsched.ir.values import Value, ValueKind
from quintsched.simulation.simulator import Simulation, Span
from quintsched.trace.measured_costs import UNITS
from quintsched.trace.measured_trace import MeasuredSpan, MeasuredStep

from .scene import flows_of_ranks

Event: TypeAlias = dict[str, object]

FORWARD_US = 1000.0
"""Microseconds of a forward, if that is the unit of time."""


def save_events(simulation: Simulation, step: MeasuredStep | None, path: Path) -> None:
    """Write a `.json` file of trace events; raises `UsageError` on failure."""
    events = [*_events_of(simulation, 0, "planned")]
    if step is not None:
        events += _events_of(step, 1, f"measured, step {step.number}")
    data = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": simulation.plan.title,
            "planned": {"makespan": simulation.makespan, "bubble": simulation.bubble, "unit": simulation.unit},
            **({} if step is None else {"measured": step.summary()}),
        },
    }
    write_whole(path, json.dumps(data, allow_nan=False), "the picture")


def _events_of(run: Simulation | MeasuredStep, pid: int, name: str) -> Iterator[Event]:
    scale = UNITS["us"] / UNITS[run.unit] if run.unit in UNITS else FORWARD_US
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    several = len(run.plan.stage_to_pp) > run.plan.mesh.pp
    for rank, row in enumerate(run.timeline):
        place: Event = {"pid": pid, "tid": rank}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}}
        copies: Event = {"pid": pid, "tid": len(run.timeline) + rank}
        if any(isinstance(span.instruction, HostCopy) for span in row):
            yield {"ph": "M", "name": "thread_name", **copies, "args": {"name": f"rank {rank}, host"}}
        for span in row:
            if not isinstance(span.instruction, Recv):
                beside = isinstance(span.instruction, HostCopy)
                yield from _slices(span, copies if beside else place, scale, several)
    yield from _flows(run, pid, scale)


def _slices(span: Span, place: Event, scale: float, several: bool) -> Iterator[Event]:
    i = span.instruction
    # A simulated send lasts as long as its message, but takes no time on the rank.
    length = 0.0 if isinstance(i, Send) and not isinstance(span, MeasuredSpan) else span.end - span.start
    event = {"ph": "X", "cat": i.op, **place, "ts": span.start * scale}
    arguments = {field.name: getattr(i, field.name) for field in fields(i)}
    yield event | {"name": short(i, with_stage=several), "dur": length * scale, "args": arguments}
    if isinstance(span, MeasuredSpan) and span.wait:
        yield event | {"name": "wait", "cat": "wait", "dur": span.wait * scale}


_CARGO = {
    ValueKind.OUTPUT: "activation",
    ValueKind.OUTPUT_GRAD: "gradient",
    ValueKind.SKIP: "skip",
    ValueKind.SKIP_GRAD: "gradient of a skip",
}
"""Names of flows."""


def _flows(run: Simulation | MeasuredStep, pid: int, scale: float) -> Iterator[Event]:
    """Yield a flow from each send to the computation that consumes its message."""
    numbers, flows, takers = count(pid, 2), flows_of_ranks(run), _takers(run)
    for rank, row in enumerate(run.timeline):
        for span, used in zip(row, flows[rank], strict=True):
            if isinstance(span.instruction, Send):
                value = used.consumes[0]
                if (taken := takers.get((span.instruction.peer, value))) is None:
                    continue
                event = {"name": _CARGO[value.kind], "cat": "message", "id": next(numbers), "pid": pid}
                yield event | {"ph": "s", "tid": rank, "ts": span.start * scale}
                yield event | {"ph": "f", "bp": "e", "tid": span.instruction.peer, "ts": taken * scale}


def _takers(run: Simulation | MeasuredStep) -> dict[tuple[int, Value], float]:
    """Return, per rank and value, the time at which the computation that consumes it starts."""
    return {
        (rank, value): span.start + (span.wait if isinstance(span, MeasuredSpan) else 0.0)
        for rank, (row, flows) in enumerate(zip(run.timeline, flows_of_ranks(run), strict=True))
        for span, used in zip(row, flows, strict=True)
        if span.instruction.computes
        for value in used.consumes
    }
