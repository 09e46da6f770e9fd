"""Entry point of the solver: `solve(pp=8, microbatches=16, memory_cap=6)` returns a proved plan and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from time import monotonic
from typing import Any, cast

from quintsched.check_call_arguments import (
    FLAG,
    FUNCTION,
    NUMBER,
    TEXT,
    WHOLE_NUMBER,
    ArgumentKind,
    items,
    ours,
    shown,
    takes,
)
from quintsched.compiler import compile
from quintsched.errors import InputError, UsageError
from quintsched.ir.instruction_set import OffloadAct
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan
from quintsched.schedules.kit.given_order import schedule_of_rows
from quintsched.simulation.costs import Costs
from quintsched.simulation.notebook_html import figures
from quintsched.solve.check_order_certificate import TOLERANCE, Certificate, value_of
from quintsched.solve.named_placements import costs_for, placements, require_positive, routes_of
from quintsched.solve.noise.duration_samples import Jitter
from quintsched.solve.noise.robust_search import Robustness, harden
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_search import AFTER_INTERRUPT_S, OrderSearch, PlacementSearch, search
from quintsched.solve.order_timing import timed
from quintsched.solve.recompute_offload_or_lend import LENT, OFFLOADED, SETTINGS, Moves, search_for_room
from quintsched.solve.search_problem import NoRoomError, Orders, Problem, problem_of

AUTO = "auto"
RECOMPUTE = {"none": (0,), "all": (1,), AUTO: (0, 1)}
"""Words for the stages that recompute: none, all, or none at first."""
Stages = str | Sequence[int]

Cap = float | tuple[float, ...] | None
"""Most activations of every rank, or of each; None: any number."""
EFFORT, SECONDS = 4, 60.0
MOST_COMPUTATIONS = 300_000
"""Largest step that is searched: with more, the named schedules alone would take minutes."""
PROOF_OF_PLAN = 6.0
"""Time to compile, prove and write a plan, in units of that to number its computations."""


@dataclass(frozen=True)
class Solution:
    """Best plan that was found.

    Attributes:
        plan: the plan; its order is proved sound under the strictest transport profile.
        certificate: its value and a lower bound, as `certify` verifies them.
        span, makespan: longest span of a rank, and time until the last computation ends; the value is one of them.
        placement: name of its placement.
        parts: equal parts into which each stage of the costs was cut for this placement: 1, or the stages on a rank.
        bounds: certified lower bound of each placement that was searched, by name; `certify` verifies that of the plan.
        origin: the part of the search that found it; a name of a schedule where nothing better was found.
        proved: lower bound that CP-SAT has proved for this placement (None: none). `certify` cannot verify it.
        log: (seconds, value, lower bound, origin) of each improvement.
        robustness: 95th percentiles where durations vary; None if the search was not asked to mind that.
    """

    plan: Plan
    certificate: Certificate
    span: float
    makespan: float
    placement: str
    origin: str
    proved: float | None
    log: tuple[tuple[float, float, float, str], ...]
    robustness: Robustness | None = None
    parts: int = 1
    bounds: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Fraction by which the best order with this placement may be faster, by the better of both bounds."""
        value, bound = self.certificate.value, max(self.certificate.bound, self.proved or 0.0)
        return max(0.0, 1 - bound / value) if value else 0.0

    @property
    def status(self) -> str:
        """State of the proof: "certified" or "solver-proved" optimal, or "open"."""
        if self.certificate.gap <= TOLERANCE:
            return "certified"
        return "solver-proved" if self.gap <= TOLERANCE else "open"

    @property
    def offloads(self) -> bool:
        """Whether activations are offloaded to host memory."""
        return bool(self.plan.columns.are(OffloadAct).any())

    @property
    def lends(self) -> bool:
        """Whether activations are lent to other ranks."""
        return bool(self.plan.layout.loans)

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON data."""
        claim = self.certificate
        return {
            "placement": self.placement,
            "parts": self.parts,
            "recompute": list(self.plan.recompute),
            "recompute_microbatches": list(map(list, self.plan.recompute_microbatches)),
            "offloads": self.offloads,
            "lends": self.lends,
            "bounds": self.bounds,
            "objective": claim.objective,
            "value": claim.value,
            "span": self.span,
            "makespan": self.makespan,
            "bound": claim.bound,
            "proved": self.proved,
            "gap": self.gap,
            "status": self.status,
            "origin": self.origin,
            "rank": claim.rank,
            "reason": claim.reason,
        }

    def _repr_html_(self) -> str:
        """Return the claim and the timeline as HTML, for notebooks."""
        claim, unit = self.certificate, self.certificate.costs.unit
        rows = [
            (claim.objective, f"{claim.value:g} {unit}"),
            ("certified bound", f"{claim.bound:g} {unit}, by rank {claim.rank}: {claim.reason}"),
            ("gap", f"{100 * self.gap:.1f} %, {self.status}"),
        ]
        return f"<div>{figures(rows)}{self.plan.simulate(claim.costs)._repr_html_()}</div>"

    def __repr__(self) -> str:
        sizes = f"{self.placement}, {self.certificate.objective} {self.certificate.value:g}"
        return f"Solution({sizes}, gap {100 * self.gap:.1f} %, {self.status})"


Problems = dict[tuple[str, bool], tuple[Problem, Costs]]
"""Problem and costs by placement, and whether backwards are whole; where halves need no more memory, only halves."""
_BITS = items("a list of 0 and 1", ArgumentKind("0 or 1", lambda value: WHOLE_NUMBER.holds(value) and value in (0, 1)))
STAGES = ArgumentKind(
    "none, all, auto, or a list with 0 or 1 for each stage",
    lambda value: value in RECOMPUTE if isinstance(value, str) else _BITS.holds(value),
)
_SEVERAL_NUMBERS = items("a list of numbers", NUMBER)
CAPS = ArgumentKind(
    "a number, or a list with one per rank", lambda value: NUMBER.holds(value) or _SEVERAL_NUMBERS.holds(value)
)


@takes(
    "solve(pp=8, microbatches=16, memory_cap=6)",
    placement=TEXT,
    memory_cap=CAPS,
    costs=ours("Costs"),
    jitter=TEXT,
    seconds=NUMBER,
    seed=WHOLE_NUMBER,
    told=FUNCTION,
    recompute=STAGES,
    offload=FLAG,
    lend=FLAG,
)
def solve(
    *,
    pp: int | None = None,
    microbatches: int,
    mesh: Mesh | str | None = None,
    placement: str = "auto",
    chunks: int | None = None,
    memory_cap: float | Sequence[float] | None = None,
    costs: Costs | None = None,
    recompute: Stages = "none",
    offload: bool = False,
    lend: bool = False,
    objective: Objective = "span",
    jitter: str | None = None,
    effort: int = EFFORT,
    seconds: float = SECONDS,
    seed: int = 0,
    told: Callable[[PlacementSearch, float], None] = lambda attempt, seconds: None,
) -> Solution:
    """Search for the order of computation with the shortest step, under costs and a memory cap.

    It starts from all named schedules that fit, so it is never worse than the best of them, and is deterministic for a
    seed and an effort unless `seconds` cut it off. An interrupt (Ctrl-C) ends it with the best plan so far.

    Args:
        pp, microbatches: numbers of pipeline ranks and of microbatches.
        mesh: mesh of the plan, like "dp=2,pp=4", in place of `pp`.
        placement: "linear" (one stage on each rank), "loop" or "v" (several), or "auto": each of these in turn. Or
            "bidirectional": half of the microbatches in the opposite direction, through a second copy of the weights.
        chunks: stages on each rank, for "loop" and "v"; default: 2.
        memory_cap: most activations that a rank holds, in microbatches of a whole rank: one number, or one per rank.
        costs: times and sizes; None: unit costs. Lists per stage choose the placements with as many stages; for one
            stage on each rank, also those with several: each stage is cut in equal parts.
        recompute: stages that recompute: "none", "all", "auto" (those and microbatches that pay), or 0 or 1 for each.
        offload, lend: whether activations may go to the host, or to ranks with memory to spare, where that is faster.
        objective: "span" (the longest span of a rank) or "makespan".
        jitter: variation of durations, for which the 95th percentile is minimised: "0.1" (each times exp(0.1 z), z
            normal), "3%x4" (3 % of computations take four times as long), or a directory with a run's traces and plan.
        effort, seed: work of the search (1 takes a second for small problems), and seed of its random numbers.
        seconds: most seconds that it takes, plan and proof included; in threads beside the main one, it may be late.
        told: called with each improvement and the seconds that have passed.

    Raises:
        UsageError: wrong sizes, too few seconds, or a cap without room for a microbatch, with the smallest that works.
        InputError: costs or `recompute` of another number of stages, or costs of other microbatches.
    """
    found, began_s = mesh_of(pp, mesh), monotonic()
    require_search(objective, seconds, microbatches=microbatches, effort=effort)
    names = placements(placement, chunks, found.pp, microbatches)
    noise = None if jitter is None else Jitter.parse(jitter)
    cap, costs = _finite(memory_cap), costs or Costs()
    moves = _moves([word for word, asked in ((OFFLOADED, offload), (LENT, lend)) if asked], found, cap, noise)
    problems = _problems(found.pp, microbatches, names, costs, cap, recompute)
    ends_s = began_s + seconds - PROOF_OF_PLAN * (monotonic() - began_s) / len(problems)
    how = partial(search, objective=objective, seed=seed, effort=effort, told=told)
    until_s = ends_s if noise is None else (monotonic() + ends_s) / 2
    done, plan = search_for_room(list(problems.values()), how, until_s, recompute == AUTO, moves)
    robustness = None if noise is None else _harden(done, noise, seed, effort, ends_s)
    plan = plan or plan_of(done.found.problem, done.found.orders, found)
    return replace(_solution(done, plan, problems, costs, cap), robustness=robustness)


def _moves(words: Iterable[str], mesh: Mesh, cap: Cap, noise: Jitter | None) -> Moves:
    """Return the compilation of plans that move activations; raises `UsageError` for a cap that is not one for all."""
    found = {word: partial(plan_of, mesh=mesh, **cast(dict[str, Any], {SETTINGS[word]: cap})) for word in words}
    if found and (cap is None or isinstance(cap, tuple) or noise):
        raise UsageError("offload and lend take one memory_cap for all ranks, and no jitter")
    return found


def _finite(memory_cap: float | Sequence[float] | None) -> Cap:
    """Return a cap as a certificate has it; raises `UsageError` for nan, and for several of which one is infinite."""
    caps = tuple(map(float, memory_cap)) if isinstance(memory_cap, Iterable) else memory_cap
    if isinstance(caps, tuple) and math.inf in caps:
        raise UsageError("memory_cap is infinite for a rank; give what all microbatches hold, or any larger number")
    if caps is not None and any(map(math.isnan, caps if isinstance(caps, tuple) else [caps])):
        raise UsageError("memory_cap is nan; give numbers, of microbatches of a whole rank")
    return None if caps == math.inf else caps


def _solution(done: OrderSearch, plan: Plan, problems: Problems, costs: Costs, memory_cap: Cap) -> Solution:
    """Return the result of a search among placements, with the bounds of all."""
    best, found = done.found, reversed(problems.items())
    names = {problem.stage_to_pp: name for (name, _), (problem, _) in found}
    problem, own = best.problem, best.costs or costs
    return replace(
        solution_of(done, plan, names[problem.stage_to_pp], own, memory_cap),
        parts=1 if own == costs else problem.num_stages // plan.mesh.pp // problem.routes,
        bounds={names[one.problem.stage_to_pp]: one.bound.value for one in (*done.attempts, best)},
    )


def require_search(objective: str, seconds: float, **counts: int) -> None:
    """Raise `UsageError` for arguments of a search that make no sense."""
    require_positive(**counts)
    if not seconds > 0:
        raise UsageError(f"seconds is {seconds:g}; give a positive number")
    if objective not in ("span", "makespan"):
        raise UsageError(f'objective is {objective!r}; give "span" or "makespan"')


def _harden(done: OrderSearch, noise: Jitter, seed: int, effort: int, ends_s: float) -> Robustness:
    """Minimise the 95th percentile of the best orders, and keep those that are found."""
    best, ends_s = done.found, min(ends_s, monotonic() + AFTER_INTERRUPT_S) if done.is_interrupted else ends_s
    orders, robustness = harden(
        best.problem, best.orders, best.objective, noise, seed=seed, effort=effort, ends_s=ends_s
    )
    origin = best.origin if orders == best.orders else f"{best.origin}, hardened"
    done.best = replace(best, orders=orders, value=timed(best.problem, orders).value(best.objective), origin=origin)
    return robustness


def solution_of(done: OrderSearch, plan: Plan, placement: str, costs: Costs, memory_cap: Cap) -> Solution:
    """Return the result of a search, with the certificate of the best plan."""
    best, timed = done.found, plan.simulate(costs)
    value = max(best.value, value_of(timed, best.objective))  # more, where skips have messages of their own
    certificate = Certificate(
        objective=best.objective,
        value=value,
        bound=min(best.bound.value, value),
        rank=best.bound.rank,
        reason=best.bound.reason,
        memory_cap=memory_cap,
        costs=costs,
    )
    proved = None if math.isinf(best.proved) else best.proved
    times = timed.span, value_of(timed, "makespan")
    return Solution(plan, certificate, *times, placement, best.origin, proved, tuple(done.log))


def plan_of(problem: Problem, orders: Orders, mesh: Mesh, *, whole: bool = False, **settings: Any) -> Plan:
    """Return the proved plan of an order, with `whole` backwards if it is asked; `settings` are others of `compile`."""
    rows = problem.rows(orders, whole=whole)
    schedule = schedule_of_rows(rows, problem.stage_to_pp, mesh.pp, bidirectional=problem.routes > 1)
    settings |= {"recompute": problem.recompute or 0, "microbatches": problem.microbatches * problem.routes}
    settings |= {"recompute_microbatches": problem.recompute_microbatches or None}
    return compile(schedule, mesh=mesh, chunks=schedule.min_chunks, **settings)


def mesh_of(pp: int | None, mesh: Mesh | str | None) -> Mesh:
    """Return the mesh of a request; raises `UsageError` unless exactly one of both is given."""
    if (pp is None) == (mesh is None):
        raise UsageError("give pp, the number of pipeline ranks, or a mesh, like dp=2,pp=4")
    if mesh is not None:
        if not isinstance(mesh, str | Mesh):
            raise UsageError(f"mesh is {shown(mesh)}; give a Mesh, or text like dp=2,pp=4")
        return Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    assert pp is not None, "one of both is given"
    require_positive(pp=pp)
    return Mesh(pp=pp)


def _problems(
    pp: int, microbatches: int, names: dict[str, tuple[int, ...]], costs: Costs, memory_cap: Cap, recompute: Stages
) -> Problems:
    """Return the problems of the placements that costs and cap fit; where none does, raises the error of the one
    that needs the least memory, or the first error."""
    problems, errors = Problems(), list[UsageError | InputError]()
    if (most := 3 * microbatches * max(map(len, names.values()))) > MOST_COMPUTATIONS:
        raise UsageError(f"this step has {most:,} computations; solve takes at most {MOST_COMPUTATIONS:,}")
    for name, placed in names.items():
        each, words = dict.fromkeys((costs, costs_for(name, costs, pp, len(placed)))), RECOMPUTE.get(str(recompute))
        choices = [(one,) * len(placed) for one in words] if words else [recompute]
        for whole, own, choice in product((False, True), each, choices):
            sizes = pp, microbatches, placed, own, memory_cap, routes_of(name), choice
            try:
                if (name, whole) in problems or (whole and (memory_cap is None or not _grows(*sizes))):
                    continue
                problems[name, whole] = problem_of(*sizes, whole=whole), own
            except (InputError, NoRoomError) as error:
                errors.append(error)
    if not problems:
        no_room = [error for error in errors if isinstance(error, NoRoomError)]
        raise min(no_room, key=lambda error: error.smallest, default=errors[0])
    return problems


def _grows(pp: int, microbatches: int, placed: tuple[int, ...], costs: Costs, _: Cap, *more: Any) -> bool:
    """Return whether halves of backwards need more memory than whole ones."""
    return costs.activation_after_input is not None and problem_of(pp, microbatches, placed, costs, None, *more).grows
