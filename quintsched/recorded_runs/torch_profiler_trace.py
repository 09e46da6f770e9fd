"""Traces of torch.profiler from a pipelined run: torch's schedules name a span by each action, `PP:0F3`.

    rank 0   PP:0F0  PP:0SEND_F0  PP:0F1 …      one file per rank, as `export_chrome_trace` writes it
                └─ aten::linear …               computing begins with the first operator that is no communication

The names are the cells of torch's schedule files, so `torch_csv` makes the plan of them, and proves it. Where the file
has the same spans on a device's stream (`gpu_user_annotation`), these are its times. The k-th span of an action is of
the k-th step.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintsched.errors import InputError
from quintsched.ir.instruction_set import Compute
from quintsched.ir.mesh import Mesh
from quintsched.recorded_runs.recorded_run import ComputedSpan, RecordedRun, RecordedStep, recorded_run
from quintsched.torch_csv import loads
from quintsched.torch_csv.csv_vocabulary import COMPUTATIONS, Word
from quintsched.trace.read_chrome_trace import base_us, profiled_rank, read_profile

PREFIX = "PP:"
ON_HOST, ON_DEVICE = "user_annotation", "gpu_user_annotation"
COMMUNICATION = re.compile(r"c10d::|gloo:|nccl:|record_param_comms|^aten::(empty|set_)")
"""Operators before which a rank may still wait."""
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
MESSAGE = re.compile(r"(\d+)(SEND_F|RECV_B|SEND_B|RECV_F)\d+")
PER_MS = 1e3


@dataclass(frozen=True)
class _RankFile:
    """Actions of one rank, in order: of each step, (action, start, end) in microseconds."""

    path: Path
    rank: int
    steps: list[list[tuple[str, float, float]]]

    @property
    def stages(self) -> frozenset[int]:
        """Stages that it computes."""
        found = (ACTION.fullmatch(action) for action, _, _ in self.steps[0])
        return frozenset(int(match[1]) for match in found if match)


def load_profile(files: Iterable[Path]) -> RecordedRun:
    """Read the traces of all ranks; of replicas, the one with the lowest ranks counts.

    Raises `InputError` for files without such spans, and as `torch_csv.loads` does.
    """
    files = list(files)
    ranks = sorted(filter(None, map(_load, files)), key=lambda found: found.rank)
    pipeline: dict[frozenset[int], _RankFile] = {}
    for found in ranks:
        pipeline.setdefault(found.stages if found.steps else frozenset(), found)
    members = [member for stages, member in pipeline.items() if stages]
    if not members:
        raise InputError(
            f"{' and '.join(map(str, files[:2]))}: no trace with spans like PP:0F3; schedules of "
            "torch.distributed.pipelining record them, GPipe and 1F1B of one stage per rank excepted"
        )
    _require_all_stages(members)
    count = min(len(member.steps) for member in members)
    text = "\n".join(",".join(action for action, _, _ in member.steps[0]) for member in members)
    plan = loads(text, mesh=Mesh(pp=len(members)), name="recorded").plan
    steps = [RecordedStep(k, tuple(_row(member.steps[k]) for member in members)) for k in range(count)]
    return recorded_run("torch.profiler", plan, steps)


def _require_all_stages(members: Sequence[_RankFile]) -> None:
    """Raise `InputError` for a stage that no rank computes, but that others exchange messages with."""
    computed = frozenset[int]().union(*(member.stages for member in members))
    needed = set(range(max(computed)))
    for action in (action for member in members for action, _, _ in member.steps[0]):
        if match := MESSAGE.fullmatch(action):
            needed.add(int(match[1]) + (1 if match[2] in ("SEND_F", "RECV_B") else -1))
    if missing := sorted(stage for stage in needed - computed if stage >= 0):
        raise InputError(f"no trace has computations of stage {missing[0]}: the file of its rank is missing")


def _row(actions: Sequence[tuple[str, float, float]]) -> tuple[ComputedSpan, ...]:
    return tuple(
        ComputedSpan(instruction, start / PER_MS, end / PER_MS)
        for action, start, end in actions
        if (instruction := _computation(action)) is not None
    )


def _computation(action: str) -> Compute | None:
    match = ACTION.fullmatch(action)
    return COMPUTATIONS[Word(match[2])](int(match[1]), int(match[3])) if match else None


def _load(path: Path) -> _RankFile | None:
    """Return the actions of a file; None if it has none."""
    trace = read_profile(path)
    if trace is None:
        return None
    spans = [event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    named = [event for event in spans if str(event.get("name")).startswith(PREFIX)]
    if not named:
        return None
    try:
        return _RankFile(path, profiled_rank(trace, path), _steps(named, spans, base_us(trace)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: an event has no start, duration or thread: {error}") from None


def _steps(
    named: list[dict[str, Any]], spans: list[dict[str, Any]], base: float
) -> list[list[tuple[str, float, float]]]:
    """Return the actions of each step in the host's order, with the time in which they really ran."""
    on_host = sorted((one for one in named if one.get("cat") == ON_HOST), key=lambda one: float(one["ts"]))
    on_device = _on_device([one for one in named if one.get("cat") == ON_DEVICE])
    operators = _operators(spans)
    steps: list[list[tuple[str, float, float]]] = []
    counts: dict[str, int] = defaultdict(int)
    for event in on_host:
        action = str(event["name"]).removeprefix(PREFIX)
        step, counts[action] = counts[action], counts[action] + 1
        start, end = on_device.get((action, step)) or _computing(event, operators)
        while len(steps) <= step:
            steps.append([])
        steps[step].append((action, base + start, base + end))
    return [step for step in steps if len(step) == len(steps[0])]


def _on_device(events: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return start and end of the k-th span of each action, on the stream that has most of them by time."""
    lasted: dict[str, float] = defaultdict(float)
    for event in events:
        if ACTION.fullmatch(str(event["name"]).removeprefix(PREFIX)):
            lasted[str(event.get("tid"))] += float(event["dur"])
    stream = max(lasted, key=lambda tid: lasted[tid], default=None)
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for event in sorted(events, key=lambda one: float(one["ts"])):
        action = str(event["name"]).removeprefix(PREFIX)
        if str(event.get("tid")) == stream:
            found[action, counts[action]] = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            counts[action] += 1
    return found


def _operators(spans: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the starts of operators that compute, by thread."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in spans:
        if event.get("cat") == "cpu_op" and not COMMUNICATION.search(str(event.get("name"))):
            found[f"{event.get('pid')} {event.get('tid')}"].append(float(event["ts"]))
    for starts in found.values():
        starts.sort()
    return found


def _computing(event: dict[str, Any], operators: dict[str, list[float]]) -> tuple[float, float]:
    """Return the part of a span from its first operator on: nothing if it has none, all if none were recorded."""
    start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
    starts = operators.get(f"{event.get('pid')} {event.get('tid')}")
    if starts is None:
        return start, end
    place = bisect_left(starts, start)
    return (min(starts[place], end) if place < len(starts) else end), end
