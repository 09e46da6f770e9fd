"""Branch-and-bound search: frames by ascending bound, the leaves of those that may win, and then deferred leaves.

    all frames ──by ascending bound of time──▶ slower than the k-th best: pruned
                                         └───▶ too much memory: pruned
                                         └───▶ every leaf evaluated ──▶ k best, front
                                                      └─▶ deferred: per-stage recomputation, no closed form

Deferred leaves have a lower bound, and are solved or simulated by ascending bound until it exceeds the k-th best. So
nothing is lost: every strategy that is not evaluated is in a box, or has a bound, that cannot win. With `prune=False`
every leaf is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.tuning.evaluator import Evaluator, Floats
from quintsched.strategies.tuning.fastest_strategies_so_far import Candidates, Ranking, nobody
from quintsched.strategies.tuning.per_stage_recompute import solve
from quintsched.strategies.tuning.strategy_bounds import BOUND_MARGIN, memory_bounds, time_bounds
from quintsched.strategies.tuning.strategy_space import PER_STAGE, Mask, Space

ROWS_AT_ONCE = 1 << 15
"""Number of leaves evaluated before the remaining frames are pruned again."""
FIRST_ROWS = 1 << 12
"""Smaller number for the first batch, to get a time to prune by."""
GROUPS_AT_ONCE = 1 << 9
"""Number of groups of per-stage recomputation solved at once."""
SIMULATED_AT_ONCE = 1 << 4
"""Number of steps simulated at once."""

SearchProgress = Callable[[int, int, float], None]
"""Callback with frames done, frames in all, and the best time so far (inf: none)."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Result of a search, with the fate of every frame."""

    ranking: Ranking
    evaluated: Ints
    """Frames whose leaves were all evaluated, ascending; the others were pruned."""
    solved: tuple[tuple[Ints, Ints], ...]
    """Solved leaves of per-stage recomputation: places (n, 2), and the least number of each rank, (n, pp)."""
    pruned: bool
    """Whether frames were left out."""
    rows: int
    """Number of strategies that were evaluated."""
    worked_out: int
    """Number of deferred leaves that were solved or simulated afterwards."""


class BranchAndBound:
    """One search; call `run` once."""

    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        *,
        top: int = 1,
        front: bool = False,
        prune: bool = True,
        progress: SearchProgress | None = None,
    ) -> None:
        self.space, self.evaluator, self.prune, self.progress = space, evaluator, prune, progress
        self.ranking = Ranking(top, front)
        self.by_stage, self.unknown = [nobody()], [nobody()]
        """Deferred leaves with lower bounds of their times: to be solved, and to be simulated."""
        self.solved: list[tuple[Ints, Ints]] = []
        self.rows = self.worked_out = 0

    def search_space(self) -> SearchResult:
        """Search the space."""
        frames = np.arange(self.space.num_frames)
        times = None
        if self.prune:
            times = time_bounds(self.space, self.evaluator, frames)
            frames = np.lexsort((frames, times))
        evaluated = self._frames(frames, times)
        self._solve()
        self._simulate()
        return SearchResult(
            self.ranking,
            np.sort(evaluated),
            tuple(self.solved),
            pruned=self.prune,
            rows=self.rows,
            worked_out=self.worked_out,
        )

    def _frames(self, frames: Ints, times: Floats | None) -> Ints:
        """Evaluate every leaf of these frames, in order, except for frames found to be hopeless meanwhile."""
        evaluated = [np.zeros(0, np.int64)]
        ends = np.concatenate([[0], np.cumsum(self.space.leaves[frames])])
        start = 0
        while start < len(frames):
            if times is not None and times[frames[start]] > self.ranking.limit_s and not self.ranking.wants_front:
                break
            size = ROWS_AT_ONCE if start else FIRST_ROWS
            end = max(start + 1, int(np.searchsorted(ends, ends[start] + size, side="right")) - 1)
            batch = frames[start:end]
            if times is not None:
                batch = self._hopeful(batch, times[batch])
            if len(batch):
                self._leaves(batch)
                evaluated.append(batch)
            start = end
            self._report(start)
        self._report(self.space.num_frames)
        return np.concatenate(evaluated)

    def _hopeful(self, frames: Ints, times: Floats) -> Ints:
        """Return the frames that may fit, and may be among the best or on the front."""
        memory = memory_bounds(self.space, self.evaluator, frames)
        hopeless = self.ranking.hopeless(times, memory) | (memory > self.evaluator.capacity_bytes)
        return frames[~hopeless]

    def _report(self, done: int) -> None:
        if self.progress is not None:
            best = self.ranking.best
            self.progress(done, self.space.num_frames, float(best.time_s[0]) if len(best) else float("inf"))

    def _leaves(self, frames: Ints) -> None:
        columns, place = self.space.expand(frames)
        found = self.evaluator.evaluate(columns)
        self.rows += len(place)
        by_stage = columns["recompute"] == PER_STAGE
        whole = Candidates(found.step_s, found.memory_bytes, place)
        solvable = by_stage & self.space.recomputes_by_stage(place[:, 0])
        if solvable.any():
            self.by_stage.append(_lowered(whole.take_candidates(np.flatnonzero(solvable))))
        self._take(whole, found.exact, np.flatnonzero(~by_stage))

    def _take(self, found: Candidates, exact: Mask, rows: Ints) -> None:
        """Offer those of these rows that fit to the ranking; defer those without a closed form."""
        rows = rows[found.memory_bytes[rows] <= self.evaluator.capacity_bytes]
        self.ranking.offer(found.take_candidates(rows[exact[rows]]))
        unknown = rows[~exact[rows]]
        if len(unknown):
            self.unknown.append(_lowered(found.take_candidates(unknown)))

    def _solve(self) -> None:
        """Solve per-stage recomputation, by ascending bound."""
        later = _sorted(self.by_stage)
        for start in range(0, len(later), GROUPS_AT_ONCE):
            near = start + np.flatnonzero(later.time_s[start : start + GROUPS_AT_ONCE] <= self.ranking.limit_s)
            if not len(near):
                break
            place = later.place[near]
            self.worked_out += len(place)
            for part in solve(self.space, self.evaluator, place):
                self.solved.append((part.place, part.least))
                self._take(part.found, part.exact, np.arange(len(part.found)))

    def _simulate(self) -> None:
        """Simulate leaves without a closed form, by ascending bound."""
        later = _sorted(self.unknown)
        for start in range(0, len(later), SIMULATED_AT_ONCE):
            part = later.take_candidates(np.arange(start, min(start + SIMULATED_AT_ONCE, len(later))))
            near = part.take_candidates(np.flatnonzero(part.time_s <= self.ranking.limit_s))
            if not len(near):
                break
            self.worked_out += len(near)
            seconds = self.evaluator.simulate([strategy_at(self.space, near, row) for row in range(len(near))])
            self.ranking.offer(replace(near, time_s=seconds))


def strategy_at(space: Space, found: Candidates, row: int) -> Strategy:
    """Return one of the candidates as a strategy."""
    columns = space.rows(found.place[row : row + 1])
    numbers = found.numbers[row] if found.numbers else None
    return space.strategy(columns, 0, numbers)


def _lowered(found: Candidates) -> Candidates:
    return replace(found, time_s=found.time_s * (1 - BOUND_MARGIN))


def _sorted(parts: list[Candidates]) -> Candidates:
    """Return all candidates by ascending bound."""
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.joined(part)
    return joined.take_candidates(np.lexsort((joined.place[:, 1], joined.place[:, 0], joined.time_s)))
