"""Where stages lie and in which order a microbatch visits them: what data flow has to know of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Route:
    """The order in which some microbatches visit stages."""

    stages: tuple[int, ...]
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Stages on ranks, routes of microbatches, and what happens to gradients.

    `before` and `after` answer -1 where a route begins or ends.
    """

    stage_to_pp: tuple[int, ...]
    routes: tuple[Route, ...]
    trains: bool
    reduces: bool
    buckets_per_stage: int

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

    def rank_of(self, stage: int) -> int:
        """The pp rank that holds `stage`."""
        return self.stage_to_pp[stage]

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        ranks = set(self.stage_to_pp)
        return {rank: tuple(s for s, pp in enumerate(self.stage_to_pp) if pp == rank) for rank in ranks}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pp rank `rank` holds."""
        return self._stages.get(rank, ())

    @cached_property
    def _microbatches(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {stage: [] for stage in range(len(self.stage_to_pp))}
        for route in self.routes:
            for stage in route.stages:
                found[stage].extend(route.microbatches)
        return {stage: tuple(sorted(microbatches)) for stage, microbatches in found.items()}

    def microbatches_of(self, stage: int) -> tuple[int, ...]:
        """The microbatches that visit `stage`."""
        return self._microbatches[stage]
