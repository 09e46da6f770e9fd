"""Where stages lie and in which order a microbatch visits them: what data flow has to know of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quintsched.ir.columns import Flags, Ints
from quintsched.ir.mesh import Mesh
from quintsched.ir.ragged import Ragged
from quintsched.ir.zero import Zero

TWINS = "stage"
"""What ties call the weights of twins: all of a stage."""


@dataclass(frozen=True)
class Route:
    """The order in which some microbatches visit stages."""

    stages: tuple[int, ...]
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class Tie:
    """Weights that several stages hold: `number` is 0 for all weights of twins, from 1 on for the named ones."""

    params: str
    stages: tuple[int, ...]
    number: int


class Hop(NamedTuple):
    """A skip, by its number, between two stages: its value goes to the later one, its gradient back."""

    skip: int
    earlier: int
    later: int


@dataclass(frozen=True)
class Layout:
    """Stages on ranks, routes of microbatches, and what happens to activations and gradients.

    `before` and `after` answer -1 where a route begins or ends. Where microbatches are cut into slices, a
    "microbatch" here is a unit: microbatch x slices + slice. `stage_to_part` says which piece of the model each stage
    holds (none given: each its own); stages with the same piece are twins. `recompute`, `tied`, `skips`, `losses` and
    `zero` are those of a plan. `backward_order` says per stage in which order backwards end, where gradients are
    reduced as they come, `fetches` which microbatches of which stages have activations that come back from the host's
    memory.
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

    @cached_property
    def _neighbours(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """Per route: stage → (the stage before, the stage after)."""
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
        """The stage that `microbatch` visits just before `stage`, or -1."""
        return self._by_microbatch[microbatch][stage][0]

    def after(self, stage: int, microbatch: int) -> int:
        """The stage that `microbatch` visits just after `stage`, or -1."""
        return self._by_microbatch[microbatch][stage][1]

    def visits(self, stage: int, microbatch: int) -> bool:
        """Whether the route of `microbatch` leads through `stage`."""
        return stage in self._by_microbatch.get(microbatch, {})

    @cached_property
    def _tables(self) -> tuple[Ints, Ints, Ints]:
        """The route of each microbatch, and per route and stage the stage before and after."""
        route_of = np.zeros(self.num_microbatches, np.int64)
        before, after = np.full((2, len(self.routes), len(self.stage_to_pp)), -1)
        for number, (route, neighbours) in enumerate(zip(self.routes, self._neighbours, strict=True)):
            route_of[list(route.microbatches)] = number
            for stage, (previous, following) in neighbours.items():
                before[number, stage], after[number, stage] = previous, following
        return route_of, before, after

    def all_before(self, stages: Ints, microbatches: Ints) -> Ints:
        """`before`, for many at once."""
        route_of, before, _ = self._tables
        return before[route_of[microbatches], stages]

    def all_after(self, stages: Ints, microbatches: Ints) -> Ints:
        """`after`, for many at once."""
        route_of, _, after = self._tables
        return after[route_of[microbatches], stages]

    def have_loss(self, stages: Ints, microbatches: Ints) -> Flags:
        """Which of these stages have a loss of these microbatches: the last ones of routes, and those named."""
        found: Flags = self.all_after(stages, microbatches) < 0
        return found | np.isin(stages, self.losses) if self.losses else found

    @cached_property
    def visits_all(self) -> Flags:
        """(stages, microbatches): which stages each microbatch visits."""
        visits = np.zeros((len(self.stage_to_pp), self.num_microbatches), np.bool_)
        for route in self.routes:
            visits[np.ix_(route.stages, route.microbatches)] = True
        return visits

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return self.mesh.pp

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches all routes have together."""
        return sum(len(route.microbatches) for route in self.routes)

    @cached_property
    def buckets(self) -> Mapping[int, tuple[str, ...]]:
        """The gradient buckets of a stage, and the axes over which each is summed: () where there are no replicas.

        The dense weights' come first, `buckets_per_stage` of them. Where ep shares out experts that have replicas, one
        more holds the experts' weights, which ranks along ep do not have in common.
        """
        dense = dict.fromkeys(range(self.buckets_per_stage), self.mesh.replica_axes)
        experts = self.mesh.expert_replica_axes
        return {**dense, self.buckets_per_stage: experts} if experts else dense

    @cached_property
    def reductions(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """What is summed over replicas of each stage, in this order: (bucket, axes)."""
        return tuple((bucket, axes) for bucket, axes in self.buckets.items() if axes)

    @cached_property
    def reduction_of(self) -> Ints:
        """(stages, microbatches): in which reduction of its stage's buckets a microbatch's gradient is summed.

        The first, where full gradients may be resident until the end; they have to, where a stage's weights are tied:
        those gradients are complete only when those of all stages that hold the weight are. -1 where gradients are
        reduced as they come, and nothing makes that of the microbatch.
        """
        numbers = np.zeros((len(self.stage_to_pp), self.num_microbatches), np.int64)
        if self.zero.shards_gradients:
            order = Ragged.of(self.backward_order)
            stage, unit = order.expand(np.arange(len(numbers)))
            once = np.array([bool(self.ties_of(number)) for number in range(len(numbers))])
            numbers[~once] = -1
            place = np.arange(len(unit)) - order.starts[stage]
            numbers[stage, unit] = np.where(once[stage], 0, place // self.zero.every)
        return numbers

    @cached_property
    def num_reductions(self) -> Ints:
        """How often the buckets of each stage are reduced."""
        visited = np.where(self.visits_all, self.reduction_of, -1)
        found: Ints = visited.max(axis=1, initial=-1) + 1
        return found

    @property
    def most_reductions(self) -> int:
        """How often the buckets of a stage are reduced at most."""
        return int(self.num_reductions.max(initial=1))

    @cached_property
    def reduced_units(self) -> Ragged:
        """The microbatches that a reduction sums; reduction r of stage s is list s x `most_reductions` + r."""
        stage, unit = np.nonzero(self.visits_all)
        number = self.reduction_of[stage, unit]
        lists = (stage * self.most_reductions + number)[number >= 0]
        return Ragged.group(lists, unit[number >= 0], len(self.stage_to_pp) * self.most_reductions)

    @cached_property
    def _holders(self) -> dict[int, tuple[int, ...]]:
        return _grouped(self.stage_to_part)

    def part_of(self, stage: int) -> int:
        """Which piece of the model `stage` holds."""
        return self.stage_to_part[stage] if self.stage_to_part else stage

    def twins(self, stage: int) -> tuple[int, ...]:
        """All stages that hold the same piece of the model as `stage`, itself included; () where it is the only one."""
        holders = self._holders[self.stage_to_part[stage]] if self.stage_to_part else ()
        return holders if len(holders) > 1 else ()

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """All ties, in the one order in which every rank adds up their gradients: twins first, then names."""
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
        """The ties of a stage's weights, in the order of `ties`."""
        return self._ties[stage]

    @cached_property
    def skip_hops(self) -> tuple[Hop, ...]:
        """The ways of the values of skips: to each rank once, from the stage that makes it; there, from taker to taker.

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
        """The ways of their gradients: from each taker to the one before it, which adds its own, and to the source.

        So one is added at a time, and in the order in which riders are that go through all stages: the bits are theirs.
        """
        return tuple(Hop(number, *hop) for number, (_, stages) in enumerate(self.skips) for hop in pairwise(stages))

    @cached_property
    def skip_numbers(self) -> Mapping[str, int]:
        """The number of each skip, by its name."""
        return {name: number for number, (name, _) in enumerate(self.skips)}

    def recompute_every(self, stage: int) -> int:
        """k, where every k-th block of `stage` is recomputed; 0 where all activations are kept."""
        return self.recompute[stage] if self.recompute else 0

    def recomputes(self, stage: int) -> bool:
        """Whether `stage` drops activations in its forwards, and recomputes them for its backwards."""
        return self.recompute_every(stage) > 0

    @cached_property
    def recomputing(self) -> Flags:
        """`recomputes`, for all stages."""
        return np.array([self.recomputes(stage) for stage in range(len(self.stage_to_pp))], np.bool_)

    @cached_property
    def fetched(self) -> Flags:
        """(stages, microbatches): whose activations are fetched from the host's memory."""
        fetched = np.zeros((len(self.stage_to_pp), self.num_microbatches), np.bool_)
        fetched[tuple(np.array(self.fetches, np.int64).reshape(-1, 2).T)] = True
        return fetched

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The pp ranks that hold any of these stages, in rising order."""
        return tuple(sorted({self.stage_to_pp[stage] for stage in stages}))

    def rank_of(self, stage: int) -> int:
        """The pp rank that holds `stage`."""
        return self.stage_to_pp[stage]

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        return _grouped(self.stage_to_pp)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pp rank `rank` holds."""
        return self._stages.get(rank, ())

    @cached_property
    def units(self) -> Ragged:
        """The microbatches that visit each stage, in rising order."""
        stage, unit = np.nonzero(self.visits_all)
        return Ragged.group(stage, unit, len(self.stage_to_pp))

    def microbatches_of(self, stage: int) -> tuple[int, ...]:
        """The microbatches that visit `stage`."""
        first, end = self.units.starts[stage : stage + 2]
        return tuple(self.units.values[first:end].tolist())


def _grouped(keys: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return key → the stages that have it, in rising order."""
    found: dict[int, list[int]] = {}
    for stage, key in enumerate(keys):
        found.setdefault(key, []).append(stage)
    return {key: tuple(stages) for key, stages in found.items()}
