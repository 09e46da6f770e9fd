"""Search over the shapes of a schedule for the smallest one that fails, with the reason.

shape ──compile──▶ plan ──▶ sound under every transport profile ──▶ within the stated memory ──▶ equivalent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from quintsched.check_many_shapes import MAX_SHAPES
from quintsched.compiler import compile
from quintsched.errors import UnsoundError, UsageError, counted
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_set import short
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan
from quintsched.schedules import Schedule, Shape, find_schedule
from quintsched.schedules.kit.bare_order import order_of_computation
from quintsched.simulation.costs import Costs
from quintsched.simulation.time_grid import time_grid
from quintsched.testing.hypothesis_strategies import costs as any_costs
from quintsched.verify.equivalence import equivalence

SizeRange = int | Sequence[int]
Memory = Callable[[int, Shape], float]
"""(rank, shape) → maximum of activations on the rank, in microbatches of a whole rank."""

REPLICAS = (1, 2)

STRICTEST = next(iter(PROFILES))
"""Strictest transport profile: a plan that is free of deadlock under it is so under all others."""


NO_BOUND = "memory (no bound is stated: give memory=lambda rank, shape: …)"


@dataclass(frozen=True)
class Proved:
    """Result of `assert_sound`: how many shapes of a schedule were proved, and what was left out of the comparison."""

    schedule: str
    shapes: int
    not_compared: tuple[str, ...]

    def __str__(self) -> str:
        left_out = f"; not compared: {', '.join(self.not_compared)}" if self.not_compared else ""
        return f"{self.schedule}: {self.shapes} shapes proved{left_out}"


def assert_sound(
    schedule: Schedule | str,
    *,
    pp: SizeRange = range(1, 7),
    microbatches: SizeRange = range(1, 13),
    chunks: SizeRange | None = None,
    slices: SizeRange | None = None,
    memory: Memory | None = None,
    max_examples: int = 200,
) -> Proved:
    """Assert that a schedule gives sound plans at all shapes of these sizes that it takes.

    Args:
        schedule: the schedule, or the name of a registered one.
        pp: the number of pipeline ranks, one or several values; likewise the next three.
        microbatches: the numbers of microbatches.
        chunks: stages per rank; None takes the fewest that the schedule allows, and the next two.
        slices: pieces of a microbatch along the sequence; None takes 1, and 2 where the schedule does.
        memory: the bound that the author states: (rank, shape) → the most microbatches' activations; None: memory is
            not compared, and the result says so.
        max_examples: how many shapes are tried at most; all, where there are no more.

    Each shape has to be sound under every transport profile, with and without replicas; within the memory bound; and
    equivalent to the sequential program, by a symbolic run. A schedule with `overlaps=True` is tried both ways.
    Schedules that search get costs drawn at random. Returns how many shapes were proved, and what was not compared.
    The `AssertionError` shows the smallest shape that fails, what is wrong, and the schedule's grid.
    """
    __tracebackhide__ = True  # pytest then shows the message, not this function
    found = find_schedule(schedule) if isinstance(schedule, str) else schedule
    trial = _ScheduleTrial(found, memory)
    chunks = found.several_chunks if chunks is None else chunks
    slices = range(1, min(found.max_slices, 2) + 1) if slices is None else slices
    cases = _cases(_several(pp), _several(chunks), _several(slices), microbatches, overlaps=found.overlaps)
    failure = _explore(trial, cases, max_examples)
    if failure:
        smaller = (trial.failure(case, failure.costs) for case in cases[: cases.index(failure.case)])
        first = next(filter(None, smaller), failure)
        raise AssertionError(first.explain_failure(found))
    if not trial.taken:
        raise AssertionError(f"{found.name} takes none of the {len(cases)} shapes; {trial.refusal}")
    return Proved(found.name, len(trial.taken), () if memory else (NO_BOUND,))


def assert_plan_sound(plan: Plan, *, memory: Sequence[float] | None = None) -> None:
    """Assert that one plan is sound under every transport profile and equivalent to the sequential program.

    `memory`: maximum of activations on each pipeline rank, in microbatches.
    """
    __tracebackhide__ = True
    fault = _fault(plan, memory)
    if fault:
        raise AssertionError("\n".join([fault, *_picture(plan)]))


@dataclass(frozen=True, order=True)
class _Case:
    """Shape to try; sorted by size, so that smaller ones come first."""

    size: int
    pp: int
    chunks: int
    slices: int
    microbatches: int
    replicas: int
    overlap: bool = False

    def __str__(self) -> str:
        counts = ((self.chunks, "chunk"), (self.slices, "slice"), (self.microbatches, "microbatch"))
        words = [f"{n} {word}{'' if n == 1 else 'es' if word.endswith('h') else 's'}" for n, word in counts]
        shown = [f"pp={self.pp}", *(words if self.slices > 1 else words[::2])]
        shown += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        return ", ".join(shown + (["with overlap"] if self.overlap else []))

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp) if self.replicas == 1 else Mesh(dp=self.replicas, pp=self.pp)


def _several(sizes: SizeRange) -> Sequence[int]:
    return (sizes,) if isinstance(sizes, int) else sizes


def _cases(
    pp: Sequence[int], chunks: Sequence[int], slices: Sequence[int], microbatches: SizeRange, *, overlaps: bool
) -> list[_Case]:
    """All shapes, smallest first."""
    sizes = (pp, chunks, slices, _several(microbatches), REPLICAS, (False, True) if overlaps else (False,))
    num_shapes = math.prod(map(len, sizes))
    if not 1 <= num_shapes <= MAX_SHAPES:
        raise UsageError(f"assert_sound: {num_shapes} shapes; give 1 to {MAX_SHAPES}")
    return sorted(_Case(p * v * s * m, p, v, s, m, r, bool(overlap)) for p, v, s, m, r, overlap in product(*sizes))


@dataclass(eq=False)
class _Failure(Exception):
    """Failing shape, with its fault."""

    case: _Case
    costs: Costs | None
    message: str
    picture: tuple[str, ...]

    def explain_failure(self, schedule: Schedule) -> str:
        with_costs = f" with {self.costs!r}" if self.costs else ""
        head = f"{schedule.name} fails; the smallest shape that does: {self.case}{with_costs}"
        return "\n".join([head, "", self.message, "", *self.picture])


class _ScheduleTrial:
    """Schedule under test: checks shapes, and records whether it accepted any."""

    def __init__(self, schedule: Schedule, memory: Memory | None) -> None:
        self.schedule, self.memory = schedule, memory
        self.taken: set[_Case] = set()
        self.refusal = ""

    def failure(self, case: _Case, costs: Costs | None) -> _Failure | None:
        """Return the failure of a shape; None if it is sound, or the schedule does not accept it."""
        try:
            sizes = (case.pp, case.microbatches, case.chunks, case.slices)
            shape = self.schedule.shape(*sizes, costs, overlap=case.overlap)
        except UsageError as refusal:
            self.refusal = str(refusal)
            return None
        except UnsoundError as fault:
            return _Failure(case, costs, str(fault), ())
        self.taken.add(case)
        try:
            plan = self._compile(case, costs)
        except UnsoundError as fault:
            return _Failure(case, costs, str(fault), tuple(self._order(shape, case)))
        bound = [self.memory(rank, shape) for rank in range(case.pp)] if self.memory else None
        message = _fault(plan, bound)
        return _Failure(case, costs, message, tuple(_picture(plan))) if message else None

    def _compile(self, case: _Case, costs: Costs | None) -> Plan:
        return compile(
            self.schedule,
            mesh=case.mesh,
            microbatches=case.microbatches,
            chunks=case.chunks,
            slices=case.slices,
            costs=costs,
            overlap=case.overlap,
            buckets_per_stage=case.replicas,
        )

    def _order(self, shape: Shape, case: _Case) -> list[str]:
        try:
            return _rows(Plan.of(order_of_computation(self.schedule, shape, case.mesh)))
        except UnsoundError:  # the schedule's code itself fails: the message says so
            return []


def _explore(trial: _ScheduleTrial, cases: Sequence[_Case], max_examples: int) -> _Failure | None:
    """Search for a failing shape with hypothesis, which shrinks it."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(case=st.sampled_from(cases), costs=st.none() | any_costs() if trial.schedule.searches else st.none())
    def explore(case: _Case, costs: Costs | None) -> None:
        failure = trial.failure(case, costs)
        if failure:
            raise failure
        if case not in trial.taken:
            reject()

    try:
        explore()
    except _Failure as failure:
        return failure
    except Unsatisfiable:
        return None
    return None


def _fault(plan: Plan, memory: Sequence[float] | None) -> str | None:
    """Return the fault of a plan as text, or None."""
    verdict = plan.check(profile=STRICTEST)
    if not verdict.sound:
        return verdict.explain()
    for rank, peak in enumerate(verdict.peak_activations if memory else ()):
        if memory and peak > memory[rank]:
            held = counted(peak, "microbatch's", "g")
            words = f"rank {rank} holds up to {held} activations"
            return f"memory: {words}; the bound that its author states is {memory[rank]:g}"
    compared = equivalence(plan)
    return None if compared.holds else compared.explain()


def _picture(plan: Plan) -> list[str]:
    """Grid over time, or the bare order if the plan cannot run to its end."""
    try:
        return time_grid(plan.simulate())
    except UnsoundError:
        return _rows(plan)


def _rows(plan: Plan) -> list[str]:
    several = len(plan.stage_to_pp) > plan.mesh.pp
    return [
        f"rank {rank}  {' '.join(short(i, with_stage=several) for i in program)}"
        for rank, program in enumerate(plan.programs)
    ]
