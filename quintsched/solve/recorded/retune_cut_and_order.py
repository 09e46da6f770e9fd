"""Better cut and order for a run, from the measured times of its stages and of its blocks.

stage times (trace) ┐    a block takes its share of its stage's time; a rank whose blocks all take longer
block times         ┴─▶  than elsewhere is slower, and so would be the blocks that it gets

What a stage recomputes, and the cap of what is offloaded or lent, stay as they are. Copies of a stage have its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from quintsched.errors import InputError, UsageError, counted
from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_columns import Amounts, Flags, Ints
from quintsched.ir.instruction_set import Bwd, Compute
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.solve.order_search import search
from quintsched.solve.recorded.better_order import CHECKPOINT, better_order, caps_of
from quintsched.solve.search_problem import Orders, Problem
from quintsched.solve.stage_cuts.cut_search import Cutting, best_cut
from quintsched.solve.stage_cuts.cut_timing import graph_of
from quintsched.solve.stage_cuts.layer_costs import AMOUNTS, Kind, Layers

TIMES = AMOUNTS[:3]
LEAST_GAIN = 0.01
"""Least fraction of a step for which a run is changed."""
Rows = tuple[tuple[Compute, ...], ...]
Compiled = Callable[[tuple[int, ...], Rows | None], Plan]
"""Compiles a plan of the numbers of blocks of all stages, and of an order; None: that of the plan that has run."""


@dataclass(frozen=True, eq=False)
class PacedLayers(Layers):
    """Blocks whose times depend on where they are: each stage has a factor.

    `of_routes` has the sums of the blocks' times on each route, and `recomputed` the time of a stage's recomputation as
    a share of that of its forward.
    """

    paces: Amounts
    of_routes: dict[str, Amounts]
    recomputed: Amounts

    def of_stages(self, name: str, cuts: Ints) -> Amounts:
        """Return an amount of each stage."""
        if name == "recompute":
            return self.of_stages("forward", cuts) * self.recomputed
        ways = [np.diff(sums[cuts], axis=-1) for sums in self.of_routes[name]]
        found: Amounts = np.concatenate(ways, axis=-1) * self.paces
        return found


class FilledCutting(Cutting):
    """Cuts in which every stage has a block."""

    def are_valid(self, cuts: Ints) -> Flags:
        """Return which cuts may be used."""
        found: Flags = super().are_valid(cuts) & np.all(np.diff(cuts, axis=1) >= 1, axis=1)
        return found


@dataclass(frozen=True)
class Retuned:
    """Plan with a better cut or order, and by how much its simulated step is shorter, in the unit of the costs.

    `plan` is None where none is shorter by over `LEAST_GAIN`.
    """

    plan: Plan | None
    gain: float


def retune(
    plan: Plan,
    costs: Costs,
    held: Sequence[int],
    blocks: Sequence[float],
    compiled: Compiled,
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
        compiled: compiles the plans that are tried.
        effort, seconds: of the searches.

    Raises:
        UnsoundError: a plan that the solver does not search.
    """
    ends_s, layers = monotonic() + seconds, paced_layers(plan, costs, held, blocks)
    start = np.array([0, *np.cumsum(held[: len(held) // len(plan.routes)])])
    before, best, found = costs_of(layers, costs, start), plan, Retuned(None, 0.0)
    now = plan.simulate(before).makespan
    for cut in (_better_cut(plan, costs, layers, start, effort=effort, ends_s=ends_s), start):
        stages, after = tuple(np.diff(cut).tolist()) * len(plan.routes), costs_of(layers, costs, cut)
        try:
            best = compiled(stages, None)
        except UsageError:  # a stage with more blocks has no room under the cap of what is offloaded or lent
            continue
        orders = _better_orders(plan, after, partial(compiled, stages), effort=effort, ends_s=ends_s)
        for other in (best, *orders):
            gain = now - other.simulate(after).makespan
            found = Retuned(other, gain) if gain - found.gain > LEAST_GAIN * now else found
        return found
    return found


def _better_cut(plan: Plan, costs: Costs, layers: PacedLayers, start: Ints, *, effort: int, ends_s: float) -> Ints:
    """Return the best cut under the plan's order, copies and loans aside; the same where a stage is empty."""
    if not np.diff(start).all():
        return start
    orders = [[i for i in program if isinstance(i, Compute)] for program in plan.programs]
    p2p = costs.p2p if isinstance(costs.p2p, float | int) else costs.p2p.latency
    graph = graph_of(orders, plan.stage_to_pp, sends=p2p > 0, routes=len(plan.routes))
    cutting, microbatches = FilledCutting(layers, graph, float(p2p), "makespan"), plan.schedule.microbatches
    each = microbatches // len(plan.routes)
    found = best_cut(cutting, each, [start], effort=effort, seed=0, stops=lambda: monotonic() > ends_s)
    return start if found is None else found.cut


def paced_layers(plan: Plan, costs: Costs, held: Sequence[int], blocks: Sequence[float]) -> PacedLayers:
    """Return the blocks with their times, and the pace of each stage's rank."""
    routes = len(plan.routes)
    if len(held) != len(plan.stage_to_pp) or sum(held) != routes * len(blocks) or not min(blocks) > 0:
        raise InputError(
            f"stages of {counted(sum(held), 'block')}, but {routes * len(blocks)} times of blocks, which have to be "
            "positive"
        )
    stages, ranks, weights = np.repeat(np.arange(len(held)), held), np.array(plan.stage_to_pp), np.tile(blocks, routes)
    times = {name: _of_stages(plan, costs, name) for name in TIMES}
    whole = np.add.reduce([*times.values()])
    sums = np.bincount(stages, weights, len(held))
    pace = np.array([whole[ranks == rank].sum() / max(sums[ranks == rank].sum(), 1e-300) for rank in ranks])
    of_routes = {name: np.zeros((routes, len(blocks) + 1)) for name in AMOUNTS}
    for name, of_stages in times.items():
        share = np.divide(of_stages, whole, out=np.zeros_like(whole), where=whole > 0)
        each = weights * share[stages] * (whole / np.maximum(sums * pace, 1e-300))[stages]
        of_routes[name][:, 1:] = np.cumsum(each.reshape(routes, -1), axis=1)
    again = _of_stages(plan, costs, "recompute") * (np.array(plan.recompute or [0] * len(held)) > 0)
    recomputed = np.divide(again, times["forward"], out=np.zeros_like(again), where=times["forward"] > 0)
    kind: Kind = "decoder"
    means = {name: sums_of.mean(axis=0) for name, sums_of in of_routes.items()}
    every = (kind,) * len(blocks), ((),) * len(blocks), np.arange(len(blocks) + 1), means
    return PacedLayers(*every, pace, of_routes, recomputed)


def _of_stages(plan: Plan, costs: Costs, name: str) -> Amounts:
    return np.array([costs.of_stage(name, stage, 1, 1) for stage in range(len(plan.stage_to_pp))])


def costs_of(layers: PacedLayers, costs: Costs, cut: Ints) -> Costs:
    """Return the costs with the times of the stages of a cut."""
    names = (*TIMES, "recompute") if layers.recomputed.any() else TIMES
    return costs.model_copy(update={name: tuple(layers.of_stages(name, cut[None])[0].tolist()) for name in names})


def _better_orders(
    plan: Plan, costs: Costs, compiled: Callable[[Rows], Plan], *, effort: int, ends_s: float
) -> Iterator[Plan]:
    """Yield the plan of a better order in equal memory, if one is found; whole backwards stay whole."""
    whole = bool(plan.columns.are(Bwd).any())
    costs = costs.model_copy(update={"activation_checkpointed": CHECKPOINT} if plan.recompute else {})
    if whole:
        halves: tuple[Times, Times] = tuple(np.array(getattr(costs, name)) for name in TIMES[1:])  # type: ignore[assignment]
        both = {"backward_input": tuple((halves[0] + halves[1]).tolist()), "backward_weight": (0.0,) * len(halves[0])}
        costs = costs.model_copy(update=both)

    def plan_of(problem: Problem, orders: Orders, **settings: Any) -> Plan:
        """Compile with the settings of the run."""
        return compiled(problem.rows(orders, whole=whole))

    how = partial(search, objective="makespan", seed=0, effort=effort)
    ends_s = max(ends_s, monotonic() + 1.0)
    with suppress(UsageError):  # too little time, or a cap of what is offloaded that has no room for a microbatch
        yield better_order(plan, costs, caps_of(plan), how, plan_of, ends_s=ends_s)[1]
