"""Recorded run of a pipeline: the plan, and when each rank computed in each step.

rank 0   [F0][F1]      [B0]          a span is from where the rank begins to compute, after all waiting,
rank 1       [F0][B0]                to where it ends; all clocks agree
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quintsched.errors import InputError, UnsoundError, UsageError, counted, suggest
from quintsched.ir.instruction_set import Compute, Overlap
from quintsched.plan import Plan

UNIT = "ms"
"""Unit of all times of a recorded run."""
LATEST = 1e15
"""Milliseconds that no clock exceeds."""
CLOCK = 1e-3
"""Most milliseconds by which computations of a rank may overlap: clocks are read in whole microseconds."""


@dataclass(frozen=True)
class ComputedSpan:
    """Time in which a rank ran one computation, not begun before activations were copied to other memory, or back."""

    instruction: Compute
    start: float
    end: float
    copied: float = -math.inf
    """End of these copies, or messages with loans; negative infinity: it waits for none."""


Rows = tuple[tuple[ComputedSpan, ...], ...]
"""Spans of each pipeline rank, in order."""


@dataclass(frozen=True)
class RecordedStep:
    """One step of one pipeline."""

    number: int
    rows: Rows

    @property
    def makespan(self) -> float:
        """Time from the first computation of any rank to the end of the last."""
        return max(row[-1].end for row in self.rows) - min(row[0].start for row in self.rows)


@dataclass(frozen=True)
class RecordedRun:
    """Steps of a run, all by one plan; `source` is the kind of trace that they are from.

    `copy_ms` is the time to copy a microbatch's activations on a whole rank to the host, or to send them to a rank that
    they are lent to, and the time to get them back; 0: nothing is copied or lent, or in no time.
    """

    source: str
    plan: Plan
    steps: tuple[RecordedStep, ...]
    copy_ms: float = 0.0

    def __repr__(self) -> str:
        return f"RecordedRun({self.source}: {self.plan.title}, {counted(len(self.steps), 'step')})"

    def find_step(self, number: int | None = None) -> RecordedStep:
        """Return a step by its number; None: the one with the median makespan. Raises `UsageError` for no such step."""
        if number is None:
            return sorted(self.steps, key=lambda step: step.makespan)[(len(self.steps) - 1) // 2]
        found = {step.number: step for step in self.steps}
        if number not in found:
            raise UsageError(f"step {number} was not recorded{suggest(str(number), map(str, found))}")
        return found[number]


def recorded_run(source: str, plan: Plan, steps: Sequence[RecordedStep], copy_ms: float = 0.0) -> RecordedRun:
    """Return a checked run.

    Raises:
        InputError: steps of another order than the plan's, computations of a rank that overlap, times that are none.
        UnsoundError: a plan with overlapped computations, which are recorded as one.
    """
    if plan.columns.are(Overlap).any():
        raise UnsoundError("plans with Overlap, as this one, are not analysed: a trace has one time for both of a pair")
    computed = [tuple(i for i in program if i.computes) for program in plan.programs]
    for step in steps:
        for rank, (row, order) in enumerate(zip(step.rows, computed, strict=True)):
            if tuple(span.instruction for span in row) != order:
                raise InputError(f"step {step.number}: rank {rank} computes in another order than in the first step")
            for span in row:
                if not (span.start - CLOCK <= span.end and abs(span.start) + abs(span.end) < LATEST):
                    raise InputError(
                        f"step {step.number}: rank {rank} runs {span.instruction} from {span.start:g} to {span.end:g} "
                        f"ms; an end is not before its start, and both are below {LATEST:g}"
                    )
            for span, after in pairwise(row):
                if after.start < span.end - CLOCK:
                    raise InputError(
                        f"step {step.number}: rank {rank} runs {after.instruction} before {span.instruction} has ended"
                    )
        if not step.makespan > 0:
            raise InputError(f"step {step.number} has taken no time")
    return RecordedRun(source, plan, tuple(steps), copy_ms)
