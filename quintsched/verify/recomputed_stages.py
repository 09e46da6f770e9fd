"""Well-formedness of a plan's recomputation: which stages recompute, and which of their microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintsched.errors import counted
from quintsched.ir.layout import Route
from quintsched.ir.plan_data import MAX_RECOMPUTE, Mode


def recompute_faults(recompute: Sequence[int], num_stages: int, mode: Mode) -> Iterator[str]:
    """Yield the faults of a plan's recompute setting per stage."""
    if len(recompute) != num_stages:
        yield f"recompute names {counted(len(recompute), 'stage')}, but there are {num_stages}"
    for every in recompute:
        if type(every) is not int or not 0 <= every <= MAX_RECOMPUTE:
            yield (
                f"recompute is {every!r}; give a whole number from 0 to {MAX_RECOMPUTE}: 0 keeps the activations of "
                "a stage, 1 recomputes them, k those of every k-th block"
            )
    if any(recompute) and mode != "train":
        yield "recompute: the plan only computes forward; there is nothing to recompute for"


def recomputed_microbatch_faults(
    chosen: Sequence[Sequence[int]], recompute: Sequence[int], routes: Sequence[Route], slices: int
) -> Iterator[str]:
    """Yield the faults of the microbatches that each stage recomputes; `recompute` must have none."""
    if not any(recompute):
        yield "recompute_microbatches: no stage recomputes; set recompute to 1, or for each stage to 0 or 1"
        return
    if len(chosen) != len(recompute):
        yield f"recompute_microbatches is given for {counted(len(chosen), 'stage')}, but there are {len(recompute)}"
        return
    visits: dict[int, set[int]] = {}
    for route in routes:
        for stage in route.stages:
            visits.setdefault(stage, set()).update(unit // slices for unit in route.microbatches)
    for stage, microbatches in enumerate(chosen):
        recomputes = recompute[stage] > 0
        if recomputes != bool(microbatches):
            yield (
                f"recompute_microbatches: stage {stage} recomputes, but names no microbatch; set its recompute to 0"
                if recomputes
                else f"recompute_microbatches: stage {stage} names microbatches, but keeps the activations of all; set "
                "its recompute to 1"
            )
        elif any(type(number) is not int for number in microbatches) or sorted({*microbatches}) != [*microbatches]:
            yield f"recompute_microbatches: stage {stage} must name each microbatch once and in rising order"
        elif strangers := sorted({*microbatches} - visits.get(stage, set())):
            known = strangers[0] in set[int]().union(*visits.values())
            yield f"recompute_microbatches: microbatch {strangers[0]} " + (
                f"does not visit stage {stage}" if known else "is out of range: the plan has no such microbatch"
            )
