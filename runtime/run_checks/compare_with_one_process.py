"""Comparison of two runs of the same steps: on a mesh, and in one process.

    one process, twice          in the run's precision and in float64: their distance is the rounding error here
    tolerance of a tensor       `ROUNDING_SLACK` times that distance, and at least a few units in the last place
    mesh against one process    in the order of computation, so that the first difference is the cause
    weights after a step        within twice their updates where the gradient is below its own tolerance: an optimizer
                                that divides by its size (Adam) makes a whole update of rounding

    step 0   outputs, block by block ─▶ gradients, last block first ─▶ weights      step 1   …

Tolerances that follow from the run itself: Li et al. 2025, "TTrace: Lightweight Error Checking and Diagnosis for
Distributed Training" (arXiv 2506.09280).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError, counted
from quintsched.plan import Plan

from ..parallel.context.context_parallel import SequenceShard
from ..user_objects.tensor_distances import distance
from .record_steps import BEFORE, Made, ResultKind, StepRecording

ROUNDING_SLACK = 8.0
"""Allowed multiple of the rounding error in one process: a mesh adds up in another order."""

LAST_PLACES = 64.0
"""Least tolerance, in units in the last place of a tensor's largest number."""

EXACT = 1e-12
"""Tolerance of float64, times max(1, the largest number)."""

ResultKey = tuple[int, ResultKind, str, int, int]

RESULT_KINDS: Sequence[ResultKind] = ("output", "gradient", "weight", "figure")
"""Kinds of results, in the order in which a step computes them."""


@dataclass(frozen=True)
class Difference:
    """Tensor of the mesh that differs from that of one process.

    `difference` is the largest of any number; `where` names the tensor and its rank, in words.
    """

    step: int
    kind: ResultKind
    name: str
    rank: int
    difference: float
    tolerance: float
    where: str

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key, the order of computation in a step: gradients last block first, figures behind all."""
        block = self.name.partition(".")[0]
        number = int(block) if block.isdigit() else 0
        return self.step, RESULT_KINDS.index(self.kind), -number if self.kind == "gradient" else number, self.rank

    def __str__(self) -> str:
        return f"{self.where} differs by {self.difference:.1e}, tolerance {self.tolerance:.1e}"


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: all differences, in the order of computation, and the number of compared tensors.

    `closest` is the largest difference of tensors that agree, relative to its tolerance; `skipped` names tensors that
    one process does not compute.
    """

    differences: tuple[Difference, ...]
    compared: int
    closest: float
    steps: int
    ranks: int
    skipped: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    def explain(self) -> str:
        """Return the result in words: the first difference is the cause of later ones, or close to it."""
        end = f"; not compared: {', '.join(self.skipped)}" if self.skipped else ""
        if self.is_equal:
            return (
                f"equal: {counted(self.compared, 'tensor')} of {counted(self.steps, 'step')} on "
                f"{counted(self.ranks, 'rank')}; the largest difference is {self.closest:.2f} of its tolerance{end}"
            )
        first, others = self.differences[0], self.differences[1:]
        later = f"\n{len(others)} more differ after it, such as: {others[0]}" if others else ""
        return f"different: {first}; all that comes before it agrees{end}{later}"

    def to_data(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return {"equal": self.is_equal, **asdict(self)}


def compare(
    mesh: Sequence[StepRecording], alone: StepRecording, precise: StepRecording, plan: Plan, names: Sequence[str] = ()
) -> Comparison:
    """Compare the recordings of a mesh's ranks with that of one process, and with the same in float64.

    `names`: the class names of the blocks, for messages.
    """
    wanted, exact = _by_key(alone), _by_key(precise)
    unsure = _unsure_weights(wanted, exact)
    found: list[Difference] = []
    skipped: dict[str, None] = {}
    compared, closest = 0, 0.0
    for recording in mesh:
        for made in recording.made:
            key = (made.step, made.kind, made.name, made.unit // plan.schedule.slices, made.place)
            part = _part_of(wanted[key], made, plan, recording.coordinates) if key in wanted else None
            if part is None:
                skipped[f"{made.kind} {made.name}"] = None
                continue
            tolerance = _tolerance(wanted[key], exact[key])
            difference = distance(made.tensor, part)
            if key in unsure and difference > tolerance:
                difference = _without_unsure(made, part, *unsure[key], tolerance)
            compared += 1
            if difference <= tolerance:
                closest = max(closest, difference / tolerance)
            else:
                where = _words(made, recording, plan, names)
                found.append(Difference(made.step, made.kind, made.name, recording.rank, difference, tolerance, where))
    found += _figures(mesh, alone, precise)
    ordered = tuple(sorted(found, key=lambda one: one.order))
    return Comparison(ordered, compared, closest, len(alone.figures), len(mesh), tuple(skipped))


def joined(found: Sequence[Comparison]) -> Comparison:
    """Return the comparisons of several ranks as one."""
    differences = sorted((one for part in found for one in part.differences), key=lambda one: one.order)
    return Comparison(
        tuple(differences),
        sum(part.compared for part in found),
        max((part.closest for part in found), default=0.0),
        found[0].steps,
        sum(part.ranks for part in found),
        tuple(dict.fromkeys(name for part in found for name in part.skipped)),
    )


def to_words(comparison: Comparison, most: int) -> str:
    """Return a comparison, with at most `most` of its differences, as text that `from_words` reads."""
    return json.dumps({**asdict(comparison), "differences": [asdict(d) for d in comparison.differences[:most]]})


def from_words(words: str) -> Comparison:
    """Return the comparison that `to_words` has written."""
    data = json.loads(words)
    differences = tuple(Difference(**one) for one in data.pop("differences"))
    return Comparison(differences, **{**data, "skipped": tuple(data["skipped"])})


def _by_key(recording: StepRecording) -> dict[ResultKey, Tensor]:
    return {(made.step, made.kind, made.name, made.unit, made.place): made.tensor for made in recording.made}


def _unsure_weights(
    wanted: Mapping[ResultKey, Tensor], exact: Mapping[ResultKey, Tensor]
) -> dict[ResultKey, tuple[Tensor, float]]:
    """Return the numbers of weights of which a gradient was not larger than its tolerance, and twice their updates."""
    found: dict[ResultKey, tuple[Tensor, float]] = {}
    for key, weight in wanted.items():
        step, kind, name, unit, place = key
        before: ResultKey = (step - 1, kind, name, unit, place)
        if kind != "weight" or before not in wanted:
            continue
        is_unsure, reach = found.get(before, (torch.zeros_like(weight, dtype=torch.bool), 0.0))
        gradient = wanted.get((step, "gradient", name, unit, place))
        if gradient is not None:
            truth = exact[step, "gradient", name, unit, place]
            is_small = truth.abs() <= _tolerance(gradient, truth)
            is_unsure = is_unsure | (is_small & ((truth != 0) | (gradient != 0)))
        found[key] = is_unsure, reach + 2 * distance(weight, wanted[before])
    return found


def _without_unsure(made: Made, part: Tensor, is_unsure: Tensor, reach: float, tolerance: float) -> float:
    """Return the distance of a part of a weight, but for numbers that are unsure and no further off than updates."""
    assert made.offsets is not None
    where = tuple(slice(a, a + n) for a, n in zip(made.offsets, made.tensor.shape, strict=True))
    is_near = (made.tensor - part).abs() <= reach + tolerance
    return distance(torch.where(is_unsure[where] & is_near, part, made.tensor), part)


def _part_of(full: Tensor, made: Made, plan: Plan, coordinates: Mapping[str, int]) -> Tensor | None:
    """Return the part of a full tensor that a rank's tensor corresponds to; None where no part has its shape."""
    if made.offsets is not None:
        return full[tuple(slice(a, a + n) for a, n in zip(made.offsets, made.tensor.shape, strict=True))]
    parts = _parts(full, made.unit % plan.schedule.slices, plan, coordinates)
    return next((part for part in parts if part.shape == made.tensor.shape), None)


def _parts(full: Tensor, number: int, plan: Plan, coordinates: Mapping[str, int]) -> Iterator[Tensor]:
    """Yield candidate parts of a full output: tokens (slices, cp, tp) or a share of the last dimension (logits)."""
    rows, slices, tp = full, plan.schedule.slices, plan.mesh.axis_size("tp")
    if slices > 1 and full.dim() > 1 and full.shape[1] % slices == 0:
        rows = full.chunk(slices, 1)[number]
    try:
        rows = SequenceShard(plan.mesh.axis_size("cp"), coordinates.get("cp", 0)).cut("output", rows)
    except MisfitError:
        rows = full
    yield from (rows, full)
    for dim in (1, -1) if rows.dim() > 1 else ():
        if rows.shape[dim] % tp == 0:
            yield rows.chunk(tp, dim)[coordinates.get("tp", 0)]


def _tolerance(found: Tensor, exact: Tensor) -> float:
    if not found.is_floating_point():
        return 0.0
    largest = exact.abs().max().item() if exact.numel() else 0.0
    if found.dtype == torch.float64:
        return EXACT * max(1.0, largest)
    return ROUNDING_SLACK * distance(found, exact) + LAST_PLACES * torch.finfo(found.dtype).eps * max(largest, 1e-30)


def _words(made: Made, recording: StepRecording, plan: Plan, names: Sequence[str]) -> str:
    at = ", ".join(f"{axis}={coordinate}" for axis, coordinate in recording.coordinates.items())
    rank = f"rank {recording.rank} ({at})" if at else f"rank {recording.rank}"
    block = int(made.name.partition(".")[0])
    of_class = f" ({names[block]})" if block < len(names) else ""
    if made.kind != "output":
        when = f"step {made.step}" if made.step != BEFORE else "before the first step"
        return f"{when}: the {made.kind} of {made.name} in block {block}{of_class}, on {rank},"
    replica, unit = divmod(made.unit, plan.schedule.num_units)
    microbatch, number = divmod(unit, plan.schedule.slices)
    piece = f", slice {number}" if plan.schedule.slices > 1 else ""
    return (
        f"step {made.step}: the output of block {block}{of_class} for microbatch {microbatch}{piece} of replica "
        f"{replica}, on {rank},"
    )


def _figures(mesh: Sequence[StepRecording], alone: StepRecording, precise: StepRecording) -> Iterator[Difference]:
    """Yield differences of losses and gradient norms."""
    for recording in mesh:
        for step, (mine, its, exact) in enumerate(zip(recording.figures, alone.figures, precise.figures, strict=True)):
            for name, figure in mine.items():
                rounding = abs(its[name] - exact[name])
                tolerance = (
                    ROUNDING_SLACK * rounding + 1e-5 * abs(exact[name])
                    if rounding
                    else EXACT * max(1.0, abs(its[name]))
                )
                gap = abs(figure - its[name])
                if not gap <= tolerance and not (math.isnan(figure) and math.isnan(its[name])):
                    words = f"step {step}: the {name.replace('_', ' ')} on rank {recording.rank}"
                    yield Difference(step, "figure", name, recording.rank, gap, tolerance, words)
