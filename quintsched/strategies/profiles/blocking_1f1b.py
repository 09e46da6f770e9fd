"""Blocking 1F1B: messages are exchanges for which both neighbours stop, as in Megatron's schedule.

    stage 0   F F F ╥ B ─────── F ╥ B          ╥ activations down and gradients up, together
    stage 1     F F ╨ ╥ B ──────╥ F ╨ B        ─ waits for its neighbour

Nothing is hidden behind computation: an exchange begins when the later of the two stages is ready, and both go on when
it ends. `quintsched.simulation` times this project's runtime, in which only the consumer waits for a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quintsched.strategies.profiles.stage_times import Exchange

WAYS = ("forward_s", "backward_s", "both_s")


class Step(NamedTuple):
    """Computation of a stage, or an exchange between the stages `left` and `left + 1`."""

    seconds: float
    left: int | None = None


Program = list[Step]


def blocking_1f1b(
    forward_s: Sequence[float], backward_s: Sequence[float], between: Sequence[Exchange], microbatches: int
) -> list[float]:
    """Return when each stage has finished its last backward and sent its gradient, in seconds from the step's start."""
    programs = [_program(stage, forward_s, backward_s, between, microbatches) for stage in range(len(forward_s))]
    clock, done = [0.0] * len(programs), [0] * len(programs)
    waiting: dict[int, int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        stage = runnable.pop()
        other = _run_on(stage, programs[stage], clock, done, waiting)
        if other is not None:
            runnable += [stage, other]
    return clock


def _run_on(stage: int, program: Program, clock: list[float], done: list[int], waiting: dict[int, int]) -> int | None:
    """Advance a stage until it must wait (return None) or meets a waiting neighbour (return the neighbour)."""
    while done[stage] < len(program):
        step = program[done[stage]]
        if step.left is None:
            clock[stage] += step.seconds
            done[stage] += 1
        elif step.left in waiting:
            other = waiting.pop(step.left)
            clock[stage] = clock[other] = max(clock[stage], clock[other]) + step.seconds
            done[stage] += 1
            done[other] += 1
            return other
        else:
            waiting[step.left] = stage
            return None
    return None


def _program(
    stage: int, forward_s: Sequence[float], backward_s: Sequence[float], between: Sequence[Exchange], microbatches: int
) -> Program:
    """Return a stage's program: warm-up forwards, alternating forwards and backwards, the remaining backwards."""
    warm = min(len(forward_s) - 1 - stage, microbatches)
    steady = microbatches - warm
    forward, backward = Step(forward_s[stage]), Step(backward_s[stage])

    def meet(left: int, way: str) -> Program:
        """Return the exchange with a neighbour; nothing without one."""
        return [Step(getattr(between[left], way), left)] if 0 <= left < len(between) else []

    above, below = ({way: meet(left, way) for way in WAYS} for left in (stage - 1, stage))
    program: Program = []
    for _ in range(warm):
        program += [*above["forward_s"], forward, *below["forward_s"]]
    program += above["forward_s"] if steady else []
    for number in range(steady):
        program += [forward, *below["both_s"], backward, *above["both_s" if number < steady - 1 else "backward_s"]]
    for _ in range(warm):
        program += [*below["backward_s"], backward, *above["backward_s"]]
    return program
