"""Peak memory of a stage: state, activations of all microbatches in flight, and temporary tensors of the backward.

    16 bytes per weight │ (in flight − 1) × activations per microbatch │ this one's, freed as the backward proceeds
                        │                                              │ + gradients in and out, a recomputed segment

State is fp16 weights and gradients, and fp32 weights and Adam's two moments. The walk visits a stage's operators from
the last to the first: recomputed activations of a segment are resident until the backward of its operators is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.strategies.profiles.operator_layout import OperatorLayout, StageOperators
from quintsched.strategies.profiles.operator_rates import Rates
from quintsched.strategies.profiles.profile import Operator
from quintsched.strategies.profiles.stage_times import found

STATE = 8.0
"""Bytes of state per byte of fp16 weights: those and gradients (2), fp32 weights (2), Adam's moments (4)."""
OPTIMIZER_STATE = 9.0
"""The same in the optimizer's step: gradients are in fp32 there."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a stage."""

    state: float
    """Weights, gradients and optimizer state."""
    waiting: float
    """Activations of the microbatches in flight, without the one in its backward."""
    backward: float
    """Peak of the microbatch in its backward: kept and recomputed activations, and gradients."""
    optimizer: float
    """State in the optimizer's step, when no activations are left."""

    @property
    def peak(self) -> float:
        """Peak memory."""
        return max(self.state + self.waiting + self.backward, self.optimizer)


@dataclass(frozen=True)
class OperatorSegment:
    """Operators `begin` to `end` - 1 of a stage, recomputed together or not at all."""

    begin: int
    end: int
    recomputed: bool


def stage_memory(rates: Rates, layout: OperatorLayout, number: int) -> StageMemory:
    """Return the peak memory of stage `number` under 1F1B."""
    stage = layout.stages[number]
    operators = [found(rates, layout, placed) for placed in stage.operators]
    cuts = segments(stage, rates.profile.layer[:1])
    final = len(operators) - 1
    kept = [0.0 if o.output_freed and place < final else o.kept for place, o in enumerate(operators)]
    resident = _resident(operators, kept, cuts)
    under_way = min(len(layout.stages) - number, layout.microbatches)
    weights = sum(o.weights for o in operators)
    return StageMemory(
        STATE * weights,
        (under_way - 1) * (operators[0].input + sum(resident)),
        _fullest_backward(operators, kept, resident, cuts),
        OPTIMIZER_STATE * weights,
    )


def segments(stage: StageOperators, breaks: tuple[str, ...]) -> list[OperatorSegment]:
    """Return the segments of a stage: consecutive recomputed operators, split before each name in `breaks`."""
    made: list[OperatorSegment] = []
    for place, placed in enumerate(stage.operators):
        last = made[-1] if made else None
        if last and last.recomputed and placed.recompute and placed.name not in breaks:
            made[-1] = OperatorSegment(last.begin, place + 1, True)
        else:
            made.append(OperatorSegment(place, place + 1, placed.recompute))
    return made


def _resident(operators: list[Operator], kept: list[float], cuts: list[OperatorSegment]) -> list[float]:
    """Return the bytes that each operator keeps until the backward.

    A recomputed segment keeps its input, its output if the next operator needs it, and tensors inside it that later
    operators use.
    """
    resident = list(kept)
    for cut in cuts:
        if not cut.recomputed:
            continue
        last = operators[cut.end - 1]
        resident[cut.begin : cut.end] = [0.0] * (cut.end - cut.begin)
        is_needed = cut.end == len(operators) or not last.output_freed
        resident[cut.end - 1] = (last.output if is_needed else 0.0) + _taken_behind(operators, cut)
        if cut.begin and operators[cut.begin - 1].output_freed:
            resident[cut.begin - 1] = operators[cut.begin - 1].output
    return resident


def _taken_behind(operators: list[Operator], cut: OperatorSegment) -> float:
    """Return the bytes of a segment's tensors for later operators, without its output: a residual, attention values."""
    inside = operators[cut.begin : cut.end]
    taken = 0.0
    for place, operator in enumerate(inside[:-1]):
        later = [o.name for o in inside[place + 1 :]]
        if operator.aside and operator.aside_until not in later:
            taken += operator.aside
    return taken


def _fullest_backward(
    operators: list[Operator], kept: list[float], resident: list[float], cuts: list[OperatorSegment]
) -> float:
    fullest = 0.0
    for cut in cuts:
        before = operators[0].input + sum(resident[: cut.begin])
        for place in range(cut.begin, cut.end):
            own = sum(kept[cut.begin : place + 1]) if cut.recomputed else resident[place]
            fullest = max(fullest, before + own + _gradients(operators, place))
    return fullest


def _gradients(operators: list[Operator], place: int) -> float:
    """Return the bytes of an operator's gradients: of its output, its input, passed tensors, and its weights."""
    operator = operators[place]
    given = operators[place - 1].output if place else operator.input
    weights = operator.weights if operator.flops else 0.0
    return operator.output + (0.0 if operator.in_place else given) + operator.passed + weights
