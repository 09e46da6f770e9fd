"""Layout of a plan: placement of stages, routes of microbatches, and derived tables that the data flow needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quintsched.ir.instruction_columns import Flags, Ints
from quintsched.ir.mesh import Mesh
from quintsched.ir.ragged import Ragged
from quintsched.ir.zero_setting import Zero

TWINS = "stage"
"""Name of ties between twins, which cover all weights of a stage."""


@dataclass(frozen=True)
class Route:
    """Order in which some microbatches visit stages."""

    stages: tuple[int, ...]
    microbatches: tuple[int, ...]


def equal_routes(ways: int, num_stages: int, num_microbatches: int) -> tuple[Route, ...]:
    """Return so many routes, each with an equal share of the stages and of the microbatches, in order."""
    return tuple(map(Route, _shares(num_stages, ways), _shares(num_microbatches, ways)))


def _shares(number: int, ways: int) -> list[tuple[int, ...]]:
    ends = [number * way // ways for way in range(ways + 1)]
    return [tuple(range(start, end)) for start, end in pairwise(ends)]


@dataclass(frozen=True)
class Tie:
    """Weights that several stages hold: `number` is 0 for all weights of twins, 1, 2, … for named weights."""

    params: str
    stages: tuple[int, ...]
    number: int


class Hop(NamedTuple):
    """Hop of a skip (given by its number) between two stages: its value goes to the later one, its gradient back."""

    skip: int
    earlier: int
    later: int


@dataclass(frozen=True)
class Layout:
    """Stages on ranks, routes of microbatches, and the settings that decide about activations and gradients.

    `before` and `after` return -1 where a route begins or ends. Where microbatches are cut into slices, a
    "microbatch" here is a unit: microbatch x slices + slice. `stage_to_part` gives the piece of the model that each
    stage holds ((): each its own); stages with the same piece are twins. `recompute`, `tied`, `skips`, `losses`, `zero`
    and `recompute_microbatches` are those of the plan. `backward_order` lists per stage the units in the order in which
    their backwards end (only if gradients are sharded), `fetches` the (stage, unit) pairs whose activations come back
    from host memory or from another rank, `loans` the (stage, unit, rank) triples of activations that a rank is lent.
    """

    stage_to_pp: tuple[int, ...]
    routes: tuple[Route, ...]
    trains: bool
    mesh: Mesh
    buckets_per_stage: int
    slices: int = 1
    stage_to_part: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()
    skips: tuple[tuple[str, tuple[int, ...]], ...] = ()
    losses: tuple[int, ...] = ()
    zero: Zero = field(default_factory=Zero)
    backward_order: tuple[tuple[int, ...], ...] = ()
    fetches: tuple[tuple[int, int], ...] = ()
    loans: tuple[tuple[int, int, int], ...] = ()
    recompute_microbatches: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def _neighbours(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """Stage → (previous stage, next stage), per route."""
        return tuple(
            {
                stage: (before, after)
                for before, stage, after in zip(
                    (-1, *route.stages), route.stages, (*route.stages[1:], -1), strict=False
                )
            }
            for route in self.routes
        )

    @cached_property
    def _by_microbatch(self) -> dict[int, dict[int, tuple[int, int]]]:
        return {
            microbatch: neighbours
            for route, neighbours in zip(self.routes, self._neighbours, strict=True)
            for microbatch in route.microbatches
        }

    def before(self, stage: int, microbatch: int) -> int:
        """Stage that `microbatch` visits just before `stage`, or -1."""
        return self._by_microbatch[microbatch][stage][0]

    def after(self, stage: int, microbatch: int) -> int:
        """Stage that `microbatch` visits just after `stage`, or -1."""
        return self._by_microbatch[microbatch][stage][1]

    def visits(self, stage: int, microbatch: int) -> bool:
        """Whether the route of `microbatch` contains `stage`."""
        return stage in self._by_microbatch.get(microbatch, {})

    @cached_property
    def _tables(self) -> tuple[Ints, Ints, Ints]:
        """Route of each microbatch, and the previous and next stage: (microbatches,), 2 x (routes, stages)."""
        route_of = np.zeros(self.num_microbatches, np.int64)
        before, after = np.full((2, len(self.routes), len(self.stage_to_pp)), -1)
        for number, (route, neighbours) in enumerate(zip(self.routes, self._neighbours, strict=True)):
            route_of[list(route.microbatches)] = number
            for stage, (previous, following) in neighbours.items():
                before[number, stage], after[number, stage] = previous, following
        return route_of, before, after

    def all_before(self, stages: Ints, microbatches: Ints) -> Ints:
        """Vectorized `before`."""
        route_of, before, _ = self._tables
        return before[route_of[microbatches], stages]

    def all_after(self, stages: Ints, microbatches: Ints) -> Ints:
        """Vectorized `after`."""
        route_of, _, after = self._tables
        return after[route_of[microbatches], stages]

    def have_loss(self, stages: Ints, microbatches: Ints) -> Flags:
        """Mask of (stage, microbatch) pairs with a loss: the last stage of a route, and the stages in `losses`."""
        found: Flags = self.all_after(stages, microbatches) < 0
        return found | np.isin(stages, self.losses) if self.losses else found

    @cached_property
    def visits_all(self) -> Flags:
        """Mask (stages, microbatches) of the stages that each microbatch visits."""
        visits = np.zeros((len(self.stage_to_pp), self.num_microbatches), np.bool_)
        for route in self.routes:
            visits[np.ix_(route.stages, route.microbatches)] = True
        return visits

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.mesh.pp

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches (units) on all routes together."""
        return sum(len(route.microbatches) for route in self.routes)

    @cached_property
    def buckets(self) -> Mapping[int, tuple[str, ...]]:
        """Gradient buckets of a stage, with the axes over which each is summed: () if there are no replicas.

        Buckets 0 to `buckets_per_stage` - 1 hold the dense weights. If ep shards experts that have replicas, one more
        bucket holds the experts' weights, which differ between ranks along ep.
        """
        dense = dict.fromkeys(range(self.buckets_per_stage), self.mesh.replica_axes)
        experts = self.mesh.expert_replica_axes
        return {**dense, self.buckets_per_stage: experts} if experts else dense

    @cached_property
    def reductions(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Reductions over replicas of each stage, in order: (bucket, axes)."""
        return tuple((bucket, axes) for bucket, axes in self.buckets.items() if axes)

    @cached_property
    def reduction_of(self) -> Ints:
        """Number of the reduction that sums a microbatch's gradient: (stages, microbatches).

        It is 0 if full gradients may be resident until the end of the step. It is also 0 if weights of the stage are
        tied, as their gradients are complete only when those of all stages that hold them are. It is -1 if gradients
        are reduced as they come and no backward makes that of the microbatch.
        """
        numbers = np.zeros((len(self.stage_to_pp), self.num_microbatches), np.int64)
        if self.zero.shards_gradients:
            order = Ragged.from_lists(self.backward_order)
            stage, unit = order.expand(np.arange(len(numbers)))
            once = np.array([bool(self.ties_of(number)) for number in range(len(numbers))])
            numbers[~once] = -1
            place = np.arange(len(unit)) - order.starts[stage]
            numbers[stage, unit] = np.where(once[stage], 0, place // self.zero.every)
        return numbers

    @cached_property
    def num_reductions(self) -> Ints:
        """Number of reductions of the buckets of each stage."""
        visited = np.where(self.visits_all, self.reduction_of, -1)
        found: Ints = visited.max(axis=1, initial=-1) + 1
        return found

    @property
    def most_reductions(self) -> int:
        """Maximum number of reductions of a stage's buckets."""
        return int(self.num_reductions.max(initial=1))

    def reduces_early(self, stage: int, *, split: bool) -> bool:
        """Whether buckets of a stage are reduced as its last backward fills them, not only when that has ended.

        Gradients must come one by one, complete, into memory that stays: not those of twins, of blocks that are partly
        recomputed in a whole backward (not `split`), and of sharded weights.
        """
        at_once = bool(self.twins(stage)) or (not split and self.recompute_every(stage) > 1)
        return not (at_once or self.zero.shards_weights)

    @cached_property
    def reduced_units(self) -> Ragged:
        """Microbatches that each reduction sums; reduction r of stage s is list s x `most_reductions` + r."""
        stage, unit = np.nonzero(self.visits_all)
        number = self.reduction_of[stage, unit]
        lists = (stage * self.most_reductions + number)[number >= 0]
        return Ragged.group(lists, unit[number >= 0], len(self.stage_to_pp) * self.most_reductions)

    @cached_property
    def _holders(self) -> dict[int, tuple[int, ...]]:
        return _grouped(self.stage_to_part)

    def part_of(self, stage: int) -> int:
        """Index of the piece of the model that `stage` holds."""
        return self.stage_to_part[stage] if self.stage_to_part else stage

    def twins(self, stage: int) -> tuple[int, ...]:
        """Stages that hold the same piece of the model as `stage`, itself included; () if it is the only one."""
        holders = self._holders[self.stage_to_part[stage]] if self.stage_to_part else ()
        return holders if len(holders) > 1 else ()

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Ties in the order in which every rank sums their gradients (to avoid deadlock): twins first, then names."""
        twins = sorted({self.twins(stage) for stage in range(len(self.stage_to_pp))} - {()})
        named = (Tie(name, stages, number) for number, (name, stages) in enumerate(self.tied, start=1))
        return (*(Tie(TWINS, stages, 0) for stages in twins), *named)

    @cached_property
    def _ties(self) -> dict[int, tuple[Tie, ...]]:
        found: dict[int, list[Tie]] = {stage: [] for stage in range(len(self.stage_to_pp))}
        for tie in self.ties:
            for stage in tie.stages:
                found[stage].append(tie)
        return {stage: tuple(ties) for stage, ties in found.items()}

    def ties_of(self, stage: int) -> tuple[Tie, ...]:
        """Ties of a stage's weights, in the order of `ties`."""
        return self._ties[stage]

    @cached_property
    def skip_hops(self) -> tuple[Hop, ...]:
        """Hops of skip values: to each rank once, from the stage that makes it; within a rank, from taker to taker.

        Skip 0, 3, 5, 7 on the ranks 0, 1, 1, 0: hops 0 to 3, 3 to 5 (in place) and 0 to 7 (in place).
        """
        hops = []
        for number, (_, (source, *takers)) in enumerate(self.skips):
            latest = {self.rank_of(source): source}
            for taker in takers:
                hops.append(Hop(number, latest.get(self.rank_of(taker), source), taker))
                latest[self.rank_of(taker)] = taker
        return tuple(hops)

    @cached_property
    def skip_chains(self) -> tuple[Hop, ...]:
        """Hops of skip gradients: from each taker to the one before it, which adds its own, and at last to the source.

        So one gradient is added at a time, in the same order as for riders (which visit all stages): bitwise equal.
        """
        return tuple(Hop(number, *hop) for number, (_, stages) in enumerate(self.skips) for hop in pairwise(stages))

    @cached_property
    def skip_numbers(self) -> Mapping[str, int]:
        """Number of each skip, by name."""
        return {name: number for number, (name, _) in enumerate(self.skips)}

    def recompute_every(self, stage: int) -> int:
        """Interval k if every k-th block of `stage` is recomputed; 0 if all activations are kept."""
        return self.recompute[stage] if self.recompute else 0

    def recomputes(self, stage: int, microbatch: int) -> bool:
        """Whether `stage` drops activations in the forward of `microbatch` and recomputes them for its backward."""
        return bool(self.recomputing[stage, microbatch])

    @cached_property
    def recomputing(self) -> Flags:
        """Vectorized `recomputes`: a mask (stages, microbatches)."""
        sizes = len(self.stage_to_pp), self.num_microbatches, self.slices
        return recomputed_units(self.recompute, self.recompute_microbatches, *sizes)

    @cached_property
    def fetched(self) -> Flags:
        """Mask (stages, microbatches) of the activations that come back from host memory or from another rank."""
        fetched = np.zeros((len(self.stage_to_pp), self.num_microbatches), np.bool_)
        fetched[tuple(np.array(self.fetches, np.int64).reshape(-1, 2).T)] = True
        return fetched

    @cached_property
    def lent_to(self) -> Mapping[tuple[int, int], int]:
        """Rank that the activations of a (stage, microbatch) are lent to, where they are."""
        return {(stage, microbatch): rank for stage, microbatch, rank in self.loans}

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Pipeline ranks that hold any of these stages, in ascending order."""
        return tuple(sorted({self.stage_to_pp[stage] for stage in stages}))

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds `stage`."""
        return self.stage_to_pp[stage]

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        return _grouped(self.stage_to_pp)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that pipeline rank `rank` holds."""
        return self._stages.get(rank, ())

    @cached_property
    def units(self) -> Ragged:
        """Microbatches that visit each stage, in ascending order."""
        stage, unit = np.nonzero(self.visits_all)
        return Ragged.group(stage, unit, len(self.stage_to_pp))

    def microbatches_of(self, stage: int) -> tuple[int, ...]:
        """Microbatches that visit `stage`, in ascending order."""
        first, end = self.units.starts[stage : stage + 2]
        return tuple(self.units.values[first:end].tolist())


def recomputed_units(
    recompute: tuple[int, ...], microbatches: tuple[tuple[int, ...], ...], num_stages: int, num_units: int, slices: int
) -> Flags:
    """Return the mask (stages, units) of a plan's recomputation: all slices of a microbatch are recomputed together."""
    found = np.zeros((num_stages, num_units), np.bool_)
    for stage, every in enumerate(recompute):
        chosen = list(microbatches[stage]) if microbatches else slice(None)
        found.reshape(num_stages, -1, slices)[stage, chosen] = every > 0
    return found


def _grouped(keys: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return key → the stages that have it, in ascending order."""
    found: dict[int, list[int]] = {}
    for stage, key in enumerate(keys):
        found.setdefault(key, []).append(stage)
    return {key: tuple(stages) for key, stages in found.items()}
