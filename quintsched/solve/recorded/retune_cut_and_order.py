"""Better cut and order for a run, from the measured times of its stages and of its blocks.

stage times (trace) ┐    a block takes its share of its stage's time; a rank whose blocks all take longer
block times         ┴─▶  than elsewhere is slower, and so would be the blocks that it gets
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from quintsched.errors import InputError, counted
from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_columns import Amounts, Flags, Ints
from quintsched.ir.instruction_set import Bwd, Compute
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.solve.order_certificate import require_searched
from quintsched.solve.order_search import search
from quintsched.solve.order_timing import timed
from quintsched.solve.search_problem import problem_of
from quintsched.solve.stage_cuts.cut_search import Cutting, best_cut
from quintsched.solve.stage_cuts.cut_timing import graph_of
from quintsched.solve.stage_cuts.layer_costs import AMOUNTS, Kind, Layers

TIMES = AMOUNTS[:3]
LEAST_GAIN = 0.01
"""Least fraction of a step for which a run is changed."""
Rows = tuple[tuple[Compute, ...], ...]


@dataclass(frozen=True, eq=False)
class PacedLayers(Layers):
    """Blocks whose times depend on where they are: each stage has a factor."""

    paces: Amounts

    def of_stages(self, name: str, cuts: Ints) -> Amounts:
        """Return an amount of each stage."""
        found: Amounts = super().of_stages(name, cuts) * self.paces
        return found


class FilledCutting(Cutting):
    """Cuts in which every stage has a block."""

    def are_valid(self, cuts: Ints) -> Flags:
        """Return which cuts may be used."""
        found: Flags = super().are_valid(cuts) & np.all(np.diff(cuts, axis=1) >= 1, axis=1)
        return found


@dataclass(frozen=True)
class Retuned:
    """Better cut and order; `rows` are None where the order stays as it is. Costs are of the stages before and after.

    `is_better` says whether the replayed computations of the step become shorter by more than `LEAST_GAIN`.
    """

    stages: tuple[int, ...]
    rows: Rows | None
    before: Costs
    after: Costs
    is_better: bool


def retune(
    plan: Plan,
    costs: Costs,
    held: Sequence[int],
    blocks: Sequence[float],
    *,
    effort: int = 1,
    seconds: float = 10.0,
) -> Retuned:
    """Search for a better cut under the plan's order, and then for a better order under that cut.

    Args:
        plan: the plan that was measured.
        costs: times of each stage, as `Trace.costs` has them.
        held: number of blocks of each stage.
        blocks: times of the blocks, one by one; only their ratios count.
        effort, seconds: of the searches.

    Raises:
        UnsoundError: a plan that the solver does not search.
    """
    require_searched(plan)
    ends_s, microbatches = monotonic() + seconds, plan.schedule.microbatches
    layers = paced_layers(plan, costs, held, blocks)
    orders = [[i for i in program if isinstance(i, Compute)] for program in plan.programs]
    p2p = costs.p2p if isinstance(costs.p2p, float | int) else costs.p2p.latency
    cutting = FilledCutting(layers, graph_of(orders, plan.stage_to_pp, sends=p2p > 0), float(p2p), "makespan")
    start = np.array([0, *np.cumsum(held)])
    found = best_cut(cutting, microbatches, [start], effort=effort, seed=0, stops=lambda: monotonic() > ends_s)
    cut = start if found is None else found.cut
    before, after = (costs_of(layers, costs, one) for one in (start, cut))
    now = float(cutting.times(start[None])[0])
    kept = float(cutting.times(cut[None])[0])
    rows, saved = _better_order(plan, after, orders, effort=effort, seconds=max(ends_s - monotonic(), 1.0))
    is_other = saved > LEAST_GAIN * kept
    gain = now - kept + is_other * saved
    stages = tuple(np.diff(cut).tolist())
    return Retuned(stages, rows if is_other else None, before, after, gain > LEAST_GAIN * now)


def paced_layers(plan: Plan, costs: Costs, held: Sequence[int], blocks: Sequence[float]) -> PacedLayers:
    """Return the blocks with their times, and the pace of each stage's rank."""
    if len(held) != len(plan.stage_to_pp) or sum(held) != len(blocks) or not min(blocks) > 0:
        raise InputError(
            f"stages of {counted(sum(held), 'block')}, but {len(blocks)} times of blocks, which have to be positive"
        )
    stages, ranks, weights = np.repeat(np.arange(len(held)), held), np.array(plan.stage_to_pp), np.array(blocks)
    times = {name: np.array([costs.of_stage(name, s, 1, 1) for s in range(len(held))]) for name in TIMES}
    whole = np.add.reduce([*times.values()])
    sums = np.bincount(stages, weights, len(held))
    pace = np.array([whole[ranks == rank].sum() / max(sums[ranks == rank].sum(), 1e-300) for rank in ranks])
    sums_of = {name: np.zeros(len(blocks) + 1) for name in AMOUNTS}
    for name, of_stages in times.items():
        share = np.divide(of_stages, whole, out=np.zeros_like(whole), where=whole > 0)
        each = weights * share[stages] * (whole / np.maximum(sums * pace, 1e-300))[stages]
        sums_of[name] = np.array([0.0, *np.cumsum(each)])
    kind: Kind = "decoder"
    return PacedLayers((kind,) * len(blocks), ((),) * len(blocks), np.arange(len(blocks) + 1), sums_of, pace)


def costs_of(layers: PacedLayers, costs: Costs, cut: Ints) -> Costs:
    """Return the costs with the times of the stages of a cut."""
    return costs.model_copy(update={name: tuple(layers.of_stages(name, cut[None])[0].tolist()) for name in TIMES})


def _better_order(
    plan: Plan, costs: Costs, orders: list[list[Compute]], *, effort: int, seconds: float
) -> tuple[Rows, float]:
    """Return an order in equal memory, and the time that it saves; whole backwards stay whole."""
    whole = any(isinstance(i, Bwd) for order in orders for i in order)
    halves: tuple[Times, Times] = tuple(np.array(getattr(costs, name)) for name in TIMES[1:])  # type: ignore[assignment]
    if whole:
        both = {"backward_input": tuple((halves[0] + halves[1]).tolist()), "backward_weight": (0.0,) * len(halves[0])}
        costs = costs.model_copy(update=both)
    problem = problem_of(
        plan.mesh.pp, plan.schedule.microbatches, plan.stage_to_pp, costs, plan.simulate().peak_activations
    )
    known = tuple(tuple(problem.numbers(order)) for order in orders)
    done = search(
        [(problem, costs)],
        "makespan",
        seed=0,
        effort=effort,
        seconds=seconds,
        known={"as it is": known},
    )
    return problem.rows(done.found.orders, whole=whole), timed(problem, known).makespan - done.value
