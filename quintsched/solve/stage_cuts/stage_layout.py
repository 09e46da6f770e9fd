"""Entry point of cuts: `cut_stages(costs, pp=8, microbatches=32, chunks=4)` returns the best cut, with its schedule.

schedules ──▶ an order for each ──▶ its best cut ┐
"solve"   ──▶ an order for a cut ──▶ a cut for the order ──▶ … ┴──▶ the fastest that fits

Cut, placement and order together gain more than one after the other (AdaPtis, arXiv:2509.23722).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np

from quintsched.check_call_arguments import NUMBER, TEXT, WHOLE_NUMBER, items, ours, takes
from quintsched.compiler import compile
from quintsched.errors import InputError, UnsoundError, UsageError, counted
from quintsched.ir.instruction_columns import Ints
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan
from quintsched.schedules import Schedule, all_schedules, find_schedule
from quintsched.simulation.costs import Costs
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_search import search
from quintsched.solve.search_problem import Orders, Problem, problem_of
from quintsched.solve.solved_plan import mesh_of, plan_of, require_search
from quintsched.solve.stage_cuts.cut_search import Cutting, best_cut, even
from quintsched.solve.stage_cuts.cut_timing import OrderGraph, graph_of
from quintsched.solve.stage_cuts.layer_costs import AMOUNTS, LayerCosts, Layers
from quintsched.solve.stage_cuts.layout_strings import megatron_layout, read_megatron_layout, torchtitan_modules

SOLVE, AUTO = "solve", "auto"
"""Words in place of a schedule's name: an order that is searched, and all orders."""
ROUNDS = 3
"""Most times that an order is searched for the best cut so far."""
GAIN = 1e-6
"""Least gain for which another round begins."""


@dataclass(frozen=True, eq=False)
class StageCut:
    """Layers of each stage, under one schedule.

    Attributes:
        schedule: name of the schedule, or "solve".
        stage_to_pp: pipeline rank of each stage.
        layers: the layers that were cut.
        cut: pieces before each stage, and all.
        value: time of a step, by the objective.
        peaks: most memory of each rank.
        state, activation: memory of each stage: weights and the like, and what one microbatch holds.
        is_exact: whether no other cut is faster with this schedule; False where not all were tried.
        orders: the order of computation, if it was searched.
    """

    schedule: str
    stage_to_pp: tuple[int, ...]
    layers: Layers
    cut: Ints
    value: float
    peaks: tuple[float, ...]
    is_exact: bool
    orders: Orders | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        """Number of layers of each stage: `--stages` of other commands."""
        return tuple(np.diff(self.layers.ends[self.cut]).tolist())

    @property
    def megatron(self) -> str:
        """Layout string of Megatron-LM, which places stages in a loop."""
        return megatron_layout(self.layers, self.cut)

    @property
    def torchtitan(self) -> list[list[str]]:
        """Module names of each stage, as torchtitan's `module_fqns_per_model_part`."""
        return torchtitan_modules(self.layers, self.cut)

    def of_stages(self, name: str) -> tuple[float, ...]:
        """Return an amount of each stage: forward, backward_input, backward_weight, activation or state."""
        return tuple(self.layers.of_stages(name, self.cut[None])[0].tolist())

    @property
    def costs(self) -> dict[str, tuple[float, ...]]:
        """Costs of each stage, as a costs file has them."""
        return {name: self.of_stages(name) for name in AMOUNTS[:-1]}


@dataclass(frozen=True, eq=False)
class CutStages:
    """Result: the best cut, even stages under the first schedule, and each given layout under the same.

    `even` and `others` are timed whether they keep to the memory cap or not.
    """

    best: StageCut
    even: StageCut
    others: tuple[StageCut, ...]
    sizes: tuple[Mesh, int]
    costs: LayerCosts

    @property
    def gain(self) -> float:
        """Fraction of the time of even stages that the best cut saves."""
        return self.gain_over(self.even)

    def gain_over(self, other: StageCut) -> float:
        """Return the fraction of another cut's time that the best one saves."""
        return 1 - self.best.value / other.value if other.value else 0.0

    def plan(self) -> Plan:
        """Return the proved plan of the best cut."""
        mesh, microbatches = self.sizes
        best, chunks = self.best, len(self.best.stage_to_pp) // mesh.pp
        if best.orders is None:
            return compile(best.schedule, mesh=mesh, microbatches=microbatches, chunks=chunks, stages=best.stages)
        problem = _problem(best, self.costs, mesh.pp, microbatches, None)
        return replace_blocks(plan_of(problem, best.orders, mesh), best.stages)


def replace_blocks(plan: Plan, stages: Sequence[int]) -> Plan:
    """Return a plan with these numbers of blocks in its stages."""
    return Plan.of(replace(plan, blocks_per_stage=tuple(stages)))


@takes(
    "cut_stages(LayerCosts.load(path), pp=4, microbatches=16)",
    costs=ours("LayerCosts"),
    schedules=items("a list of names", TEXT),
    memory_cap=NUMBER,
    layouts=items("a list of layout strings", TEXT),
    seconds=NUMBER,
    seed=WHOLE_NUMBER,
)
def cut_stages(
    costs: LayerCosts,
    *,
    pp: int | None = None,
    mesh: Mesh | str | None = None,
    microbatches: int,
    chunks: int = 1,
    schedules: Sequence[str] = (),
    memory_cap: float | None = None,
    objective: Objective = "span",
    layouts: Sequence[str] = (),
    effort: int = 4,
    seconds: float = 60.0,
    seed: int = 0,
) -> CutStages:
    """Cut layers into stages, and choose among schedules: the fastest step whose ranks keep to a memory cap.

    Args:
        costs: times and memory of each layer.
        pp: number of pipeline ranks; or give a `mesh`.
        mesh: mesh of the plan, like "dp=2,pp=4".
        microbatches: number of microbatches.
        chunks: stages on each rank.
        schedules: names; "auto": all that have as many stages on a rank, and "solve", which searches for an order. By
            default 1f1b, or with chunks interleaved-1f1b.
        memory_cap: most memory of a rank, in the unit of the costs.
        objective: "span" (longest span of a rank) or "makespan".
        layouts: Megatron-LM's layout strings to start from and to compare with.
        effort: work of the search; equal values give equal cuts.
        seconds: most seconds that it takes.
        seed: of the random numbers.

    Raises:
        UsageError: sizes that a schedule does not take, layouts of other layers, or a cap in which nothing has room.
    """
    found = mesh_of(pp, mesh)
    require_search(objective, seconds, microbatches=microbatches, chunks=chunks, effort=effort)
    if memory_cap is not None and not memory_cap > 0:
        raise UsageError(f"memory_cap is {memory_cap:g}; give a positive number of {costs.memory_unit}")
    run = _LayoutSearch(
        costs, Layers.of(costs), found, microbatches, chunks, memory_cap, objective, effort, monotonic() + seconds, seed
    )
    return run.best_of(_names(schedules, chunks), layouts)


def _names(schedules: Sequence[str], chunks: int) -> list[str]:
    names = list(schedules) or ["1f1b" if chunks == 1 else "interleaved-1f1b"]
    if AUTO not in names:
        return names
    every = [one.name for one in all_schedules() if _may_be_cut(one) and one.min_chunks <= chunks <= one.max_chunks]
    return [*(name for name in names if name != AUTO), *(name for name in every if name not in names), SOLVE]


def _may_be_cut(schedule: Schedule) -> bool:
    special = schedule.bidirectional or schedule.routes or schedule.searches or not schedule.built_in
    return schedule.mode == "train" and not special


@dataclass
class _LayoutSearch:
    """Arguments of a search, and its steps."""

    costs: LayerCosts
    layers: Layers
    mesh: Mesh
    microbatches: int
    chunks: int
    memory_cap: float | None
    objective: Objective
    effort: int
    ends_s: float
    seed: int
    is_interrupted: bool = False
    is_exact: bool = True
    """Whether all cuts were tried under each order."""
    cuts: list[StageCut] = field(default_factory=list)
    errors: list[UsageError] = field(default_factory=list)
    compared: list[StageCut] = field(default_factory=list)
    """Best cut of each schedule, errors of those that do not fit, and the starts under the first schedule."""

    def best_of(self, names: list[str], layouts: Sequence[str]) -> CutStages:
        """Return the best cut of all schedules."""
        given = [read_megatron_layout(text, self.layers) for text in layouts]
        stages = self.mesh.pp * self.chunks
        for text, cut in zip(layouts, given, strict=True):
            if len(cut) != stages + 1:
                raise UsageError(f"layout {text}: it has {counted(len(cut) - 1, 'stage')}, not {stages}")
        starts = [even(self.layers, stages), *given]
        try:
            self.search(names, starts)
        except KeyboardInterrupt:
            self.is_interrupted = True
        if self.is_interrupted and not self.cuts:
            raise KeyboardInterrupt
        usual = _names((), self.chunks)[0]
        compared = self.compared or [self.judged(usual, self.named(usual), start) for start in starts]
        if not self.cuts:
            if self.errors and len(self.errors) == len(names):
                raise self.errors[0]
            if self.memory_cap is None:
                raise UsageError("the time was over before one order was timed; allow for more seconds")
            least = min(max(cut.peaks) for cut in compared)
            none = "no cut keeps" if self.is_exact and SOLVE not in names else "no cut was found that keeps"
            raise UsageError(
                f"{none} to the memory cap of {self.memory_cap:g} {self.costs.memory_unit}; even stages need "
                f"{least:.6g}: give more, or another schedule"
            )
        first, *others = compared
        best = min(self.cuts, key=lambda cut: cut.value)
        return CutStages(best, first, tuple(others), (self.mesh, self.microbatches), self.costs)

    def search(self, names: list[str], starts: list[Ints]) -> None:
        """Add the best cut of each schedule, schedules that do not fit, and the times of the starts under the first."""
        for name in names:
            if name == SOLVE or self.is_interrupted:
                continue
            try:
                graph = self.named(name)
            except (UsageError, InputError, UnsoundError) as error:
                if len(names) == 1:
                    raise
                self.errors.append(UsageError(str(error)))
                continue
            self.compared = self.compared or [self.judged(name, graph, start) for start in starts]
            best = self.cut_of(name, graph, [*starts, *(cut.cut for cut in self.cuts)])
            self.cuts += [best] if best else []
        if SOLVE in names:
            self.solve_orders(starts)

    @property
    def is_over(self) -> bool:
        return self.is_interrupted or monotonic() > self.ends_s

    def named(self, name: str) -> OrderGraph:
        """Return the graph of a named schedule's order."""
        schedule = find_schedule(name)
        if not _may_be_cut(schedule):
            raise UsageError(f"{name}: layout cuts stages for schedules in one direction that do not search")
        shape = schedule.shape(self.mesh.pp, self.microbatches, self.chunks)
        orders = [_sides(schedule.order(rank, shape)) for rank in range(self.mesh.pp)]
        return graph_of(orders, shape.stage_to_pp, sends=self.costs.p2p > 0)

    def cutting(self, graph: OrderGraph) -> Cutting:
        """Return the problem of a cut under an order."""
        cap = math.inf if self.memory_cap is None else self.memory_cap
        return Cutting(self.layers, graph, self.costs.p2p, self.objective, cap)

    def judged(self, name: str, graph: OrderGraph, cut: Ints) -> StageCut:
        """Return a given cut, with its time whether it fits or not."""
        return self._stage_cut(name, graph, cut, float(self.cutting(graph).times(cut[None])[0]), False)

    def cut_of(
        self,
        name: str,
        graph: OrderGraph,
        starts: list[Ints],
        orders: Orders | None = None,
        until_s: float = math.inf,
    ) -> StageCut | None:
        """Return the best cut under an order; None if none fits."""
        cutting = self.cutting(graph)
        self.is_exact &= cutting.has_few_cuts
        try:
            found = best_cut(
                cutting,
                self.microbatches,
                starts,
                effort=self.effort,
                seed=self.seed,
                stops=lambda: self.is_over or monotonic() > until_s,
            )
        except KeyboardInterrupt:
            found, self.is_interrupted = cutting.best, True
        return None if found is None else self._stage_cut(name, graph, found.cut, found.value, found.is_exact, orders)

    def _stage_cut(
        self, name: str, graph: OrderGraph, cut: Ints, value: float, is_exact: bool, orders: Orders | None = None
    ) -> StageCut:
        peaks = tuple(graph.peaks(self.layers, cut[None])[0].tolist())
        return StageCut(name, graph.stage_to_pp, self.layers, cut, value, peaks, is_exact, orders)

    def solve_orders(self, starts: list[Ints]) -> None:
        """Add the best cuts with searched orders: of each placement, in turns an order and a cut for it."""
        placements = {cut.stage_to_pp: cut for cut in sorted(self.cuts, key=lambda cut: -cut.value)}
        if not placements:
            graph = self.named(_names((), self.chunks)[0])
            one_by_one = replace(graph, held=tuple(np.ones((1, held.shape[1])) for held in graph.held))
            best = self.cut_of(SOLVE, one_by_one, starts, until_s=(monotonic() + self.ends_s) / 2)
            placements = {best.stage_to_pp: best} if best else {}
        for start in placements.values():
            best, seconds = start, (self.ends_s - monotonic()) / len(placements)
            for _ in range(ROUNDS):
                again = None if self.is_interrupted else self.solved_once(best, seconds / ROUNDS)
                self.cuts += [again] if again else []
                if again is None or again.value > best.value * (1 - GAIN):
                    break
                best = again

    def solved_once(self, start: StageCut, seconds: float) -> StageCut | None:
        """Return the best cut for the best order for a cut; None where no order fits, or time is over."""
        if seconds <= 0:
            return None
        try:
            problem = _problem(start, self.costs, self.mesh.pp, self.microbatches, self.memory_cap)
            done = search(
                [(problem, _costs(start, self.costs))],
                self.objective,
                seed=self.seed,
                effort=self.effort,
                seconds=seconds,
            )
        except UsageError:
            return None
        self.is_interrupted = self.is_interrupted or done.is_interrupted
        orders = done.found.orders
        graph = graph_of(problem.rows(orders), start.stage_to_pp, sends=self.costs.p2p > 0)
        return self.cut_of(SOLVE, graph, [start.cut], orders)


def _sides(order: Iterable[object]) -> list[Compute]:
    return [side for found in order for side in found.sides if isinstance(side, Fwd | Bwd | BwdInput | BwdWeight)]  # type: ignore[attr-defined]


def _costs(cut: StageCut, costs: LayerCosts) -> Costs:
    return Costs.model_validate({"unit": costs.unit, "p2p": costs.p2p, **cut.costs})


def _problem(cut: StageCut, costs: LayerCosts, pp: int, microbatches: int, memory_cap: float | None) -> Problem:
    """Return the problem of an order for a cut: each rank's cap is what its state leaves."""
    state, ranks = np.array(cut.of_stages("state")), np.array(cut.stage_to_pp)
    caps = None if memory_cap is None else [memory_cap - float(state[ranks == rank].sum()) for rank in range(pp)]
    return problem_of(pp, microbatches, cut.stage_to_pp, _costs(cut, costs), caps)
