"""Greedy list scheduling of one stage per rank, under given costs and a cap on memory.

It simulates a run in which every free rank starts a pass that can run; the order of each rank is the order of its
starts. A `Manner` sets the priorities, above all the *lead*: the number of forwards a rank is ahead of its input
halves.

    lead 4    F0 F1 F2 F3 I0 F4 I1 F5 I2 …           weight halves fill the gaps, or free memory when it is full
    lead 1    F0 I0 F1 I1 …

A forward begins only if the cap leaves room for it. A run with an eager manner never gets stuck: microbatches come in
order, so all memory that a rank lacks for the oldest one is freed by its own weight halves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from quintsched.ir.instruction_set import BwdInput, BwdWeight, Compute, Fwd

EPSILON = 1e-9
MOST_ROOM = 2**53
"""Number of microbatches with room for them if there is no cap."""
FLOOD = 2
"""Number of forwards by which a stage may be ahead of the next one before it holds back."""


PerStage: TypeAlias = tuple[tuple[float, ...], ...]
"""One value per stage and microbatch."""


@dataclass(frozen=True)
class Workload:
    """Input of the scheduler: times of the three passes, activation memory per microbatch, travel times of messages.

    `send_activation[s]` is the travel time from stage s to s+1, `send_gradient[s]` that of the opposite direction.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    activation: PerStage
    after_input: PerStage
    send_activation: PerStage
    send_gradient: PerStage
    cap: float

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return len(self.forward[0])

    @property
    def num_passes(self) -> int:
        """Number of computations."""
        return 3 * self.microbatches * len(self.forward)


@dataclass(frozen=True)
class Manner:
    """Priorities of a rank.

    `slope`: the lead is 1 on the last rank, and larger by `slope` on each rank before.
    `early_forward`, `early_weight`: fraction of a forward (weight half) that may remain when a better pass, which is
    already on its way, arrives.
    `strict`: forwards and input halves alternate exactly by the lead, and a rank waits for a better pass only while it
    stays within the longest idle time of any rank. Otherwise the manner is eager: any pass that can run may go first.
    """

    slope: float
    early_forward: float = 0.0
    early_weight: float = 0.0
    strict: bool = False


@dataclass(frozen=True)
class ListSchedule:
    """Result of a run: longest span, makespan, peak memory of a rank, and the order of each stage's passes."""

    span: float
    makespan: float
    peak: float
    orders: tuple[tuple[Compute, ...], ...]


def schedule_greedily(work: Workload, manner: Manner, longest_span: float = math.inf) -> ListSchedule | None:
    """Run `work` in a manner; None if it gets stuck, or once its span is sure to exceed `longest_span`."""
    run = _GreedyRun(work, manner, longest_span)
    while run.events:
        now, stage = heappop(run.events)
        if not run.stages[stage].decide(now):
            return None
    return run.outcome()


class _GreedyRun:
    """State of a simulated run: its stages, and the events at which each of them decides."""

    def __init__(self, work: Workload, manner: Manner, longest_span: float) -> None:
        self.events: list[tuple[float, int]] = [(0.0, 0)]
        self.longest_idle = 0.0
        self.stages = [_Stage(number, work, manner, longest_span, self) for number in range(len(work.forward))]
        self.stages[0].inputs = [0.0] * work.microbatches
        self._work = work

    def wake(self, stage: int, now: float) -> None:
        """Schedule a decision of a stage at time `now`."""
        heappush(self.events, (now, stage))

    def outcome(self) -> ListSchedule | None:
        """Return the result of the run; None if some pass never ran."""
        if any(stage.weights < self._work.microbatches for stage in self.stages):
            return None
        return ListSchedule(
            span=max(stage.busy_until - stage.began for stage in self.stages),
            makespan=max(stage.busy_until for stage in self.stages),
            peak=max(stage.peak for stage in self.stages),
            orders=tuple(tuple(stage.order) for stage in self.stages),
        )


class _Stage:
    """State of a stage during a run; `inputs[k]` and `gradients[k]` are the arrival times for microbatch k."""

    def __init__(self, number: int, work: Workload, manner: Manner, longest_span: float, run: _GreedyRun) -> None:
        behind = len(work.forward) - 1 - number
        self.inputs: list[float] = []
        self.gradients: list[float] = []
        self.order: list[Compute] = []
        self.forwards = self.halves = self.weights = 0
        self.busy_until = self.peak = 0.0
        self.began = -1.0
        self._number, self._is_last, self._run, self._manner = number, behind == 0, run, manner
        self._microbatches, self._cap = work.microbatches, work.cap + EPSILON
        self._send_activation = () if self._is_last else work.send_activation[number]
        self._send_gradient = work.send_gradient[number - 1] if number else ()
        self._forward, self._half = work.forward[number], work.backward_input[number]
        self._weight = work.backward_weight[number]
        self._activation, self._after = work.activation[number], work.after_input[number]
        most = max(self._activation)
        room = int(min(self._cap / most, MOST_ROOM)) if most else work.microbatches
        self._lead = max(1, min(round(1 + manner.slope * behind), room))
        self._memory = self._idle = 0.0
        passes = map(sum, zip(self._forward, self._half, self._weight, strict=True))
        self._most_idle = longest_span - math.fsum(passes) + EPSILON

    def decide(self, now: float) -> bool:
        """Start the best pass that can run now, if the stage is free; return False if the span must get too long."""
        if now < self.busy_until:
            return True
        choice = self._choose(now)
        if choice is None:
            return True
        if self.began < 0:
            self.began = now
        else:
            self._idle += now - self.busy_until
            self._run.longest_idle = max(self._run.longest_idle, self._idle)
        if choice is Fwd:
            self._begin_forward(now)
        elif choice is BwdInput:
            self._begin_half(now)
        else:
            self._begin_weight(now)
        self._run.wake(self._number, self.busy_until)
        return self._idle <= self._most_idle

    def _choose(self, now: float) -> type[Compute] | None:
        """Return the pass to start at this time; None to wait."""
        manner, ahead = self._manner, self.forwards >= self.halves + self._lead
        gradient = self.gradients[self.halves] if self.halves < len(self.gradients) else math.inf
        forward = self.inputs[self.forwards] if self._may_forward(gradient) else math.inf
        if manner.strict:
            if ahead or self._floods() or self.forwards == self._microbatches:
                forward = math.inf
            else:
                gradient = math.inf
        if gradient <= now and (ahead or forward > now):
            return BwdInput
        if forward <= now:
            fits = not ahead or self._fits(self._forward[self.forwards], manner.early_forward, now, gradient)
            return Fwd if fits else None
        if self.weights < self.halves:
            length = self._weight[self.weights]
            return BwdWeight if self._fits(length, manner.early_weight, now, min(gradient, forward)) else None
        return None

    def _may_forward(self, gradient: float) -> bool:
        """Return whether the next forward has (or will get) its input, has memory, and the next stage may need it."""
        if self.forwards >= len(self.inputs) or self._memory + self._activation[self.forwards] > self._cap:
            return False
        return not (self._floods() and (gradient < math.inf or self.weights < self.halves))

    def _floods(self) -> bool:
        """Return whether the next stage has enough forwards waiting."""
        if self._is_last or not self.halves:
            return False
        return self.forwards >= self._run.stages[self._number + 1].forwards + FLOOD

    def _fits(self, length: float, early: float, now: float, coming: float) -> bool:
        """Return whether a pass of this length may start although a better one arrives at `coming`."""
        if length - (coming - now) <= early * length + EPSILON:
            return True
        if not self._manner.strict or self.began < 0:
            return False
        return self._idle + (coming - self.busy_until) > self._run.longest_idle + EPSILON

    def _begin_forward(self, now: float) -> None:
        number = self.forwards
        self.order.append(Fwd(self._number, number))
        self.forwards += 1
        self.busy_until = now + self._forward[number]
        self._memory += self._activation[number]
        self.peak = max(self.peak, self._memory)
        if self._is_last:
            self.gradients.append(self.busy_until)
        else:
            arrival = self.busy_until + self._send_activation[number]
            self._run.stages[self._number + 1].inputs.append(arrival)
            self._run.wake(self._number + 1, arrival)
        if self._number:
            self._run.wake(self._number - 1, now)  # the previous stage may have held forwards back

    def _begin_half(self, now: float) -> None:
        number = self.halves
        self.order.append(BwdInput(self._number, number))
        self.halves += 1
        self.busy_until = now + self._half[number]
        self._memory += self._after[number] - self._activation[number]
        if self._number:
            arrival = self.busy_until + self._send_gradient[number]
            self._run.stages[self._number - 1].gradients.append(arrival)
            self._run.wake(self._number - 1, arrival)

    def _begin_weight(self, now: float) -> None:
        number = self.weights
        self.order.append(BwdWeight(self._number, number))
        self.weights += 1
        self.busy_until = now + self._weight[number]
        self._memory -= self._after[number]
