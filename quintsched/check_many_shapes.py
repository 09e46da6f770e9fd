"""Proof of a schedule over many shapes: those that are sound, those it refuses, and the smallest that fails.

pp 1..4 × chunks 1 × microbatches 1..8 ──compile and check each──▶ an outcome per shape, smallest first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from quintsched.compiler import compile
from quintsched.errors import UnsoundError, UsageError
from quintsched.ir.mesh import Mesh
from quintsched.schedules import Schedule

MAX_SHAPES = 100_000


class Status(StrEnum):
    """Result of proving one shape."""

    SOUND = "sound"
    REFUSED = "refused"
    """Refused by the schedule's own limits or constraint."""
    UNSOUND = "unsound"


@dataclass(frozen=True)
class SweepOutcome:
    """One shape with its result; `reason` says why it is refused, or holds the counter-example."""

    pp: int
    chunks: int
    microbatches: int
    status: Status
    reason: str = ""


def prove(
    schedule: Schedule,
    *,
    pp: Sequence[int],
    microbatches: Sequence[int],
    chunks: Sequence[int] | None = None,
    memory_cap: float | None = None,
) -> Iterator[SweepOutcome]:
    """Yield the outcome of every shape, in ascending number of computations.

    `chunks=None` tries the fewest that the schedule allows, and the next two; `memory_cap` is that of `check`. A
    schedule with `overlaps=True` is also proved with overlapped pairs, one that takes slices also with two slices.
    Raises `UsageError` for more than `MAX_SHAPES` shapes.
    """
    chunks = schedule.several_chunks if chunks is None else chunks
    num_shapes = len(pp) * len(chunks) * len(microbatches)
    if num_shapes > MAX_SHAPES:
        raise UsageError(f"{num_shapes} shapes are more than the {MAX_SHAPES} that are proved at once; narrow a range")
    shapes = sorted(product(pp, chunks, microbatches), key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
    return (_outcome(schedule, *shape, memory_cap) for shape in shapes)


def _outcome(schedule: Schedule, pp: int, chunks: int, microbatches: int, memory_cap: float | None) -> SweepOutcome:
    def prove_with(slices: int = 1, *, overlap: bool = False) -> None:
        mesh = Mesh(pp=pp)
        plan = compile(schedule, mesh=mesh, microbatches=microbatches, chunks=chunks, slices=slices, overlap=overlap)
        if memory_cap is not None:
            plan.check(memory_cap=memory_cap).raise_if_unsound()

    try:
        prove_with()
        if schedule.overlaps:
            prove_with(overlap=True)
        if schedule.max_slices > 1:
            with suppress(UsageError):  # a schedule may refuse two slices and still take the shape
                prove_with(slices=2)
    except UsageError as refusal:
        return SweepOutcome(pp, chunks, microbatches, Status.REFUSED, str(refusal))
    except UnsoundError as fault:
        return SweepOutcome(pp, chunks, microbatches, Status.UNSOUND, str(fault))
    return SweepOutcome(pp, chunks, microbatches, Status.SOUND)
