"""Kineto trace (`torch.profiler`, Chrome format) of some steps on one GPU, reduced to seconds by kind of work.

    {"traceEvents": [{"cat": "kernel", "name": "ampere_fp16_s16816gemm_…", "ts": 12.5, "dur": 830, "args":
                      {"correlation": 7}},
                     {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 7}, …},
                     {"cat": "user_annotation", "name": "ProfilerStep#3"}, …]}

Kernels are classified by name: matrix products, fused attention, collectives, and all others as memory passes; kernels
launched in an optimizer's step count as optimizer. A trace without kernels is of a CPU: there the self time of each
operator counts. The number of steps is that of the marks `ProfilerStep#`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from quintsched.errors import InputError
from quintsched.files.strictjson import describe_faults
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.profiles.profile import Profile, ProfiledStep, WorkKind

MICROSECOND = 1e-6
KERNEL_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
STEP, OPTIMIZER = "ProfilerStep#", "Optimizer.step#"

KERNEL_NAMES: tuple[tuple[WorkKind, re.Pattern[str]], ...] = (
    ("communication", re.compile(r"nccl|rccl|gloo:|c10d::|all_?reduce|all_?gather|reduce_?scatter|SendRecv", re.I)),
    ("attention", re.compile(r"flash|fmha|scaled_dot_product|attention", re.I)),
    (
        "product",
        re.compile(
            r"gemm|cutlass|xmma|nvjet|wgmma|hgmma|cijk_|splitK|aten::(add|b|badd)?mm$|aten::linear$|mkldnn", re.I
        ),
    ),
    ("optimizer", re.compile(r"multi_tensor_apply|adam|lamb|_foreach_", re.I)),
)
"""Pattern of names for each kind, first match wins. Other names are passes over memory."""


@dataclass(frozen=True)
class Event:
    """Event of a trace, in microseconds."""

    category: str
    name: str
    start: float
    duration: float
    thread: tuple[str, str]
    correlation: str | None

    @property
    def end(self) -> float:
        """End of the event."""
        return self.start + self.duration


def from_trace(trace: object, model: Model, strategy: Strategy, source: str) -> Profile:
    """Return the profile of a parsed trace; raises `InputError` for anything but a trace."""
    events = list(_events(trace, source))
    steps = len({event.name for event in events if event.name.startswith(STEP)}) or 1
    on_device = [event for event in events if event.category in KERNEL_CATEGORIES]
    seconds = dict[WorkKind, float]()
    for kind, took in _kernels(on_device, events) if on_device else _operators(events):
        seconds[kind] = seconds.get(kind, 0.0) + took * MICROSECOND / steps
    if not seconds:
        raise InputError(f"{source}: no kernels and no operators; profile with activities CUDA and CPU, or CPU")
    try:
        measured = ProfiledStep.model_validate({"model": model, "strategy": strategy, "seconds": seconds})
    except ValidationError as error:
        raise InputError(f"{source}: {describe_faults(error)}") from None
    return Profile(name=model.name, source=source, steps=(measured,))


def kind_of(name: str) -> WorkKind:
    """Return the kind of work of a kernel, or of an operator, by its name."""
    return next((kind for kind, pattern in KERNEL_NAMES if pattern.search(name)), "pass")


def _events(trace: object, source: str) -> Iterator[Event]:
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise InputError(f"{source}: /traceEvents: no list of events; is it what export_chrome_trace wrote?")
    for event in trace["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X" or "cat" not in event:
            continue
        try:
            start, duration = float(event["ts"]), float(event.get("dur", 0.0))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError(f"{source}: the event {event.get('name')!r} has no time") from None
        arguments = event.get("args")
        correlation = str(arguments.get("correlation")) if isinstance(arguments, dict) else None
        thread = (str(event.get("pid")), str(event.get("tid")))
        yield Event(str(event["cat"]), str(event.get("name")), start, duration, thread, correlation)


def _kernels(kernels: Iterable[Event], events: list[Event]) -> Iterator[tuple[WorkKind, float]]:
    """Yield the times of kernels by kind; those launched within an optimizer's step count as optimizer."""
    launched = {event.correlation: event for event in events if event.category in LAUNCHES}
    of_optimizer = _Spans(events)
    for kernel in kernels:
        launch = launched.get(kernel.correlation)
        kind = kind_of(kernel.name)
        if launch is not None and kind != "communication" and of_optimizer.around(launch):
            kind = "optimizer"
        yield kind, kernel.duration


ANNOTATED = frozenset({"user_annotation", "cpu_op"})


def _operators(events: list[Event]) -> Iterator[tuple[WorkKind, float]]:
    """Yield the self times of operators on their threads by kind."""
    of_optimizer = _Spans(events)
    of_thread: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.category == "cpu_op" and not event.name.startswith((STEP, OPTIMIZER, "autograd::")):
            of_thread.setdefault(event.thread, []).append(event)
    for own in of_thread.values():
        for event, alone in _alone(own):
            kind = kind_of(event.name)
            yield ("optimizer" if of_optimizer.around(event) and kind != "communication" else kind), alone


def _alone(events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event of a thread with its self time (without nested events)."""
    open_events: list[tuple[Event, float]] = []
    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        while open_events and event.start >= open_events[-1][0].end:
            yield open_events.pop()
        if open_events:
            outer, alone = open_events[-1]
            open_events[-1] = outer, alone - event.duration
        open_events.append((event, event.duration))
    yield from open_events


class _Spans:
    """Spans of the optimizer on each thread, for queries whether an event lies within one."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._of_thread: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for event in events:
            if event.name.startswith(OPTIMIZER) and event.category in ANNOTATED:
                self._of_thread.setdefault(event.thread, []).append((event.start, event.end))
        for spans in self._of_thread.values():
            spans.sort()

    def around(self, event: Event) -> bool:
        """Return whether an event begins within a span of its thread."""
        spans = self._of_thread.get(event.thread, [])
        place = bisect_right(spans, (event.start, float("inf"))) - 1
        return place >= 0 and event.start < spans[place][1]
