"""The fullest moment of a stage: state, activations of all microbatches under way, and the backward's own tensors.

    16 bytes per weight │ (under way − 1) × what a microbatch keeps │ this one's, freed as the backward walks back
                        │                                          │ + gradients in and out, a recomputed segment

fp16 weights and gradients, and in fp32 weights and both of Adam's moments. The walk goes through the operators of a
stage from the last to the first: what a segment recomputes stands until its operators have had their backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.strategies.profiles.layout import Layout, Stage
from quintsched.strategies.profiles.profile import Operator
from quintsched.strategies.profiles.rates import Rates
from quintsched.strategies.profiles.stages import found

STATE = 8.0
"""Bytes for each byte of fp16 weights: gradients too (2), and in fp32 weights (2) and Adam's moments (4)."""
OPTIMIZER_STATE = 9.0
"""In the optimizer's step: gradients stand there in fp32."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a stage."""

    state: float
    """Weights, gradients and the optimizer's."""
    waiting: float
    """Activations of the microbatches under way but the one in its backward."""
    backward: float
    """Of that one, at its fullest moment: what it still keeps, recomputes, and its gradients."""
    optimizer: float
    """State in the optimizer's step, when no activation is left."""

    @property
    def peak(self) -> float:
        """The fullest moment."""
        return max(self.state + self.waiting + self.backward, self.optimizer)


@dataclass(frozen=True)
class Segment:
    """Operators `begin` to `end` of a stage, recomputed together or not at all."""

    begin: int
    end: int
    recomputed: bool


def stage_memory(rates: Rates, layout: Layout, number: int) -> StageMemory:
    """Return what stage `number` holds at its fullest moment under 1F1B."""
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


def segments(stage: Stage, breaks: tuple[str, ...]) -> list[Segment]:
    """Return how a stage falls into segments: neighbours that are recomputed, parted before each name of `breaks`."""
    made: list[Segment] = []
    for place, placed in enumerate(stage.operators):
        last = made[-1] if made else None
        if last and last.recomputed and placed.recompute and placed.name not in breaks:
            made[-1] = Segment(last.begin, place + 1, True)
        else:
            made.append(Segment(place, place + 1, placed.recompute))
    return made


def _resident(operators: list[Operator], kept: list[float], cuts: list[Segment]) -> list[float]:
    """Return what each operator leaves behind until the backward.

    A recomputed segment leaves its input, its output where the next operator keeps it, and what operators behind it
    take from inside.
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


def _taken_behind(operators: list[Operator], cut: Segment) -> float:
    """Return what a segment makes for operators behind it, its output left out: a residual, values of attention."""
    inside = operators[cut.begin : cut.end]
    taken = 0.0
    for place, operator in enumerate(inside[:-1]):
        later = [o.name for o in inside[place + 1 :]]
        if operator.aside and operator.aside_until not in later:
            taken += operator.aside
    return taken


def _fullest_backward(
    operators: list[Operator], kept: list[float], resident: list[float], cuts: list[Segment]
) -> float:
    fullest = 0.0
    for cut in cuts:
        before = operators[0].input + sum(resident[: cut.begin])
        for place in range(cut.begin, cut.end):
            own = sum(kept[cut.begin : place + 1]) if cut.recomputed else resident[place]
            fullest = max(fullest, before + own + _gradients(operators, place))
    return fullest


def _gradients(operators: list[Operator], place: int) -> float:
    """Return the bytes of an operator's gradients: of its output, its input, what passes by, and its weights."""
    operator = operators[place]
    given = operators[place - 1].output if place else operator.input
    weights = operator.weights if operator.flops else 0.0
    return operator.output + (0.0 if operator.in_place else given) + operator.passed + weights
