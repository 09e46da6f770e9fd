"""The trace recorder of one rank: when each instruction of a step began and ended, and how long it waited.

    recorder = Recorder(plan, rank, device, steps=range(2, 10))
    calls = [recorder.wrap(index, call) for index, call in …]        bound once, beside the unwrapped calls
    recorder.begin_step(step)
    for call in calls if recorder.active else unwrapped: call()
    recorder.end_step()
    recorder.save_trace(directory)

While a step runs, only timestamps of a clock are kept (`busy_clock`); they become seconds when the trace is saved. To
time instructions one by one, a traced step posts each receive by a call of its own; its calls are not bound to its
units, so that it takes the host a little longer than other steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quintsched.formats.run_plan import save_beside
from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_set import Recv
from quintsched.plan import Plan
from quintsched.trace.trace_json import RankTrace, digest_of

from ..comm import Transport
from ..comm.device import is_accelerator
from ..comm.overlap_threads import BoundCall
from .busy_clock import ClockStamp, EventClock, HostClock, TraceClock

RECORDED_STEPS = range(2, 10)
"""Steps that are recorded by default: the first ones still warm up."""


@dataclass(frozen=True)
class _StepTimestamps:
    """Timestamps of one step, by instruction; waits are (instruction, since, until)."""

    number: int
    start: list[ClockStamp | None]
    end: list[ClockStamp | None]
    waits: list[tuple[int, ClockStamp, ClockStamp]]


class Recorder:
    """Records the requested steps only; `active`: the running step is one of them."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, steps: Collection[int] = RECORDED_STEPS) -> None:
        self.active = False
        self._plan, self._rank = plan, rank
        self._pp_rank = plan.mesh.pp_rank(rank)
        self._program = plan.programs[self._pp_rank]
        self._steps = frozenset(steps)
        self._clock: TraceClock = EventClock(device) if is_accelerator(device) else HostClock()
        self.now = self._clock.now
        self._number = -1
        self._start: list[ClockStamp | None] = [None] * len(self._program)
        self._end: list[ClockStamp | None] = [None] * len(self._program)
        self._waits: list[tuple[int, ClockStamp, ClockStamp]] = []
        self._wrapped: set[int] = set()
        self._recorded: list[_StepTimestamps] = []

    @classmethod
    def from_plan(cls, plan: Plan, transport: Transport, steps: Collection[int] | None) -> Recorder | None:
        """Return the recorder of a rank; None where no steps are requested."""
        return None if steps is None else cls(plan, transport.rank, transport.device, steps)

    def forget_calls(self) -> None:
        """Prepare for the calls of a program that is bound again."""
        self._wrapped.clear()

    def wrap(self, index: int, call: BoundCall) -> BoundCall:
        """Return `call` so that its time is recorded as that of instruction `index`.

        An instruction of several calls lasts from the start of the call that is wrapped first to the end of the call
        that runs last. A reduction starts earlier, if `note_start` says so.
        """
        start, end, now, is_first = self._start, self._end, self.now, index not in self._wrapped
        self._wrapped.add(index)

        def timed() -> None:
            if is_first and start[index] is None:
                start[index] = now()
            call()
            end[index] = now()

        return timed

    def set_times(self, index: int, *, start: ClockStamp | None = None, end: ClockStamp | None = None) -> None:
        """Set when an instruction began or ended (timestamps of `now`), where that is not the span of its calls.

        A receive, for example, ends when its value is taken, inside the call of another instruction.
        """
        if start is not None:
            self._start[index] = start
        if end is not None:
            self._end[index] = end

    def note_start(self, index: int) -> None:
        """Record that an instruction begins now, unless it has begun."""
        if self._start[index] is None:
            self._start[index] = self.now()

    def add_wait(self, index: int, since: ClockStamp, until: ClockStamp) -> None:
        """Record that an instruction waited for another rank, from one timestamp of `now` to another.

        A wait for a message is recorded for the waiting instruction and for the receive.
        """
        self._waits.append((index, since, until))

    def wants(self, step: int) -> bool:
        """Whether a step is to be recorded."""
        return step in self._steps

    def begin_step(self, step: int) -> bool:
        """Start a step; return whether it is recorded."""
        self.active = self.wants(step)
        if self.active:
            self._number = step
            self._start[:] = self._end[:] = [None] * len(self._program)
            self._waits.clear()
            if not self._recorded:
                self._clock.set()
        return self.active

    def end_step(self) -> None:
        """End the step, and store its timestamps."""
        if self.active:
            self._recorded.append(_StepTimestamps(self._number, list(self._start), list(self._end), list(self._waits)))
            self.active = False

    def save_trace(self, directory: Path) -> None:
        """Write this rank's trace into a directory, if any step was recorded, and rank 0 the plan beside it.

        Raises `UsageError` if it cannot be written.
        """
        if not self._recorded:
            return
        spans = [self._read(step) for step in self._recorded]
        start, end, wait = (np.stack(times) for times in zip(*spans, strict=True))
        steps = tuple(step.number for step in self._recorded)
        RankTrace(digest_of(self._plan), self._rank, self._pp_rank, steps, start, end, wait).save_rank(directory)
        if self._rank == 0:
            save_beside(self._plan, directory)

    def _read(self, step: _StepTimestamps) -> tuple[Times, Times, Times]:
        """Return start, end and wait of each instruction, in seconds.

        One without a call takes no time: it begins and ends where the instruction before it, receives aside, has ended.
        """
        wall_s = self._clock.wall_s
        start, end, wait = np.zeros((3, len(self._program)))
        stamps = (stamp for stamp in step.start if stamp is not None)
        at = min(map(wall_s, stamps), default=0.0)
        for index, (began, ended) in enumerate(zip(step.start, step.end, strict=True)):
            start[index] = at if began is None else wall_s(began)
            end[index] = start[index] if ended is None else max(wall_s(ended), start[index])
            if not isinstance(self._program[index], Recv):
                at = end[index]
        for index, since, until in step.waits:
            wait[index] += wall_s(until) - wall_s(since)
        return start, end, np.minimum(wait, end - start)
