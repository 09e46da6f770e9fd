"""Recorded run from any trace: this project's, Primus', or torch.profiler's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from quintsched.errors import InputError, UsageError
from quintsched.formats.run_plan import plan_beside
from quintsched.ir.instruction_set import (
    BEGINS_BACKWARD,
    Compute,
    FetchAct,
    LendAct,
    OffloadAct,
    ReclaimAct,
    RecvAct,
    RecvGrad,
    ReturnAct,
)
from quintsched.plan import Plan
from quintsched.recorded_runs.primus_trace import is_primus, load_primus
from quintsched.recorded_runs.recorded_run import UNIT, ComputedSpan, RecordedRun, RecordedStep, recorded_run
from quintsched.recorded_runs.torch_profiler_trace import load_profile
from quintsched.simulation.cost_forms import Wires
from quintsched.trace.measured_trace import MeasuredSpan, MeasuredStep, Trace
from quintsched.trace.trace_json import file_name


def load_run(path: Path) -> RecordedRun:
    """Read the traces in a directory, or one file of torch.profiler.

    Raises:
        UsageError: no such directory, or no traces in it.
        InputError: broken traces, or traces of several plans.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such directory of traces")
    if not path.is_dir():
        return load_profile([path])
    if is_primus(path):
        return load_primus(path)
    beside = plan_beside(path)
    if beside is not None and (path / file_name(0)).exists():
        return _own(path, Plan.of(beside[1]))
    if beside is None and (files := sorted([*path.glob("*.json"), *path.glob("*.json.gz")])):
        return load_profile(files)
    raise UsageError(f"{path}: no traces there; give a directory with {file_name(0)} and plan.json, or of other traces")


def _own(directory: Path, plan: Plan) -> RecordedRun:
    trace = Trace.load(directory, plan)
    steps = [_computed(trace.step(number, unit=UNIT)) for number in trace.steps]
    return recorded_run("quintsched", plan, steps, _copy_ms(trace))


def _copy_ms(trace: Trace) -> float:
    """Return the time of a copy of activations to the host or back, or of a message with them; 0 without any."""
    costs = trace.costs(UNIT)
    if costs.host_bandwidth or not trace.plan.columns.are(LendAct).any():
        return 1 / costs.host_bandwidth if costs.host_bandwidth else 0.0
    size, wires = costs.activation_message, costs.p2p
    assert isinstance(size, float | int)  # one number for all stages, as measured
    return wires.latency + size / (wires.bandwidth or math.inf) if isinstance(wires, Wires) else size * wires


def _computed(step: MeasuredStep) -> RecordedStep:
    rows = tuple(tuple(_computed_spans(row)) for row in step.timeline)
    if not all(rows):
        raise InputError("a rank of the trace computes nothing")
    return RecordedStep(step.number, rows)


def _computed_spans(row: Sequence[MeasuredSpan]) -> Iterator[ComputedSpan]:
    """Yield the computations of a rank, which wait for copies right before them, and for their own back.

    That after a `LendAct` or `ReturnAct` waits until it is sent. None runs before its message is there, even if
    something else than the wait has held it up.
    """
    away, back, come = -math.inf, dict[tuple[int, int], float](), dict[tuple[bool, int, int], float]()
    for span in row:
        i = span.instruction
        if isinstance(i, OffloadAct):
            away = max(away, span.end)
        elif isinstance(i, LendAct | ReturnAct):
            away = math.inf
        elif isinstance(i, FetchAct | ReclaimAct):
            back[i.stage, i.microbatch] = span.end
        elif isinstance(i, RecvAct | RecvGrad):
            come[isinstance(i, RecvGrad), i.stage, i.microbatch] = span.end
        elif isinstance(i, Compute):
            is_backward = isinstance(i, BEGINS_BACKWARD)
            own = back.pop((i.stage, i.microbatch), -math.inf) if is_backward else -math.inf
            there = come.pop((is_backward, i.stage, i.microbatch), -math.inf)
            yield ComputedSpan(i, min(max(span.runs, there), span.end), span.end, max(min(away, span.runs), own))
            away = -math.inf
