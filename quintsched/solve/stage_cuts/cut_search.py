"""Search for the best cut of layers into stages, under one order of computation.

    cut    0 1   4     8   10     the pieces before each stage, and all; the first stage has the embedding, the last the
           ▕E▏t t▏t t t▏t t L▏    loss, and those between may be empty

Where there are few cuts, all are timed. Else a move shifts one piece from a stage to another, with those between: a
critical path of the best cut says which moves may help, as its length under another cut is one that this cut takes too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, islice

import numpy as np

from quintsched.ir.instruction_columns import Amounts, Flags, Ints
from quintsched.solve.order_problem import EPSILON, Objective
from quintsched.solve.stage_cuts.cut_timing import KINDS, PARTS, OrderGraph
from quintsched.solve.stage_cuts.layer_costs import Layers

ENUMERATED = 20_000_000
"""Most ends of computations that are computed in order to time all cuts."""
WORK = 40_000_000
"""Ends that a search by moves computes for an effort of 1."""
LEVEL = 2_000
"""Ends that take as long as a level of the graph takes for one cut."""
TRIED, PATHS, KICKS = 48, 24, 3
"""Moves that are timed together, critical paths that are remembered, and moves of a restart."""
RESTARTS, SHIFTS = 100, 20_000
"""Restarts of the search for a cut that keeps to a cap, and moves that their first steps compare."""


@dataclass(frozen=True, eq=False)
class BestCut:
    """Best cut that was found, its time, and whether all were tried."""

    cut: Ints
    value: float
    is_exact: bool


@dataclass(eq=False)
class Cutting:
    """Problem of a cut: layers, an order, and the most memory of a rank."""

    layers: Layers
    graph: OrderGraph
    p2p: float
    objective: Objective
    memory_cap: float = math.inf
    timed: int = 0
    """Ends that were computed so far."""
    best: BestCut | None = None
    """Best cut so far, for a search that is interrupted."""
    _paths: list[Ints] = field(default_factory=list)

    @property
    def num_stages(self) -> int:
        """Number of stages of a route: all routes are cut alike."""
        return len(self.graph.stage_to_pp) // self.graph.routes

    @property
    def has_few_cuts(self) -> bool:
        """Whether all cuts are timed."""
        number = math.comb(self.layers.num_pieces + self.num_stages - 3, max(self.num_stages - 1, 0))
        return number * self.graph.num_nodes <= ENUMERATED

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.graph.first)

    def are_valid(self, cuts: Ints) -> Flags:
        """Return which cuts may be used, apart from memory: the ends at their places, mtp on the last ranks' stages."""
        pieces = self.layers.num_pieces
        found: Flags = np.all(np.diff(cuts, axis=1) >= 0, axis=1)
        found &= (cuts[:, 0] == 0) & (cuts[:, -1] == pieces)
        if self.num_stages > 1:
            found &= (cuts[:, 1] >= 1) & (cuts[:, -2] < pieces)
        if self.layers.has_mtp:
            found &= cuts[:, self.num_stages - self.num_ranks] <= pieces - 2
        return found

    def keeps_cap(self, cuts: Ints) -> Flags:
        """Return which cuts keep to the memory cap."""
        if math.isinf(self.memory_cap):
            return np.ones(len(cuts), np.bool_)
        found: Flags = np.all(self.graph.peaks(self.layers, cuts) <= self.memory_cap * (1 + EPSILON), axis=1)
        return found

    def times(self, cuts: Ints) -> Amounts:
        """Return the time of each cut."""
        self.timed += len(cuts) * self.graph.num_nodes + LEVEL * len(self.graph.levels)
        return self.graph.values(self.layers, cuts, self.p2p, self.objective)

    def work(self, cuts: Ints) -> Amounts:
        """Return the most that a rank computes for one microbatch: (cuts,)."""
        whole = sum(self.layers.of_stages(name, cuts) for name in PARTS[KINDS[0]] + PARTS[KINDS[-1]])
        ranks = np.array(self.graph.stage_to_pp)
        each = np.stack([np.asarray(whole)[:, ranks == rank].sum(axis=1) for rank in range(self.num_ranks)])
        found: Amounts = each.max(axis=0)
        return found

    def remember_path(self, cut: Ints) -> None:
        """Remember the critical path of a cut."""
        self._paths.append(self.graph.critical(self.layers, cut, self.p2p, self.objective))
        del self._paths[:-PATHS]

    def least_times(self, cuts: Ints) -> Amounts:
        """Return the longest of the remembered paths under each cut."""
        durations = self.graph.durations(self.layers, cuts, self.p2p)
        found: Amounts = (np.array(self._paths) @ durations).max(axis=0)
        return found


def best_cut(
    cutting: Cutting, microbatches: int, starts: list[Ints], *, effort: int, seed: int, stops: Callable[[], bool]
) -> BestCut | None:
    """Return the best cut; None if none fits, or where there are many cuts, none that fits was found.

    Args:
        cutting: the problem.
        microbatches: number of microbatches of a step.
        starts: cuts to begin with, whether they fit or not.
        effort: work of the search by moves.
        seed: of its random numbers.
        stops: asked whether to end.
    """
    first = _best_of(cutting, np.array([*starts, balanced(cutting)]))
    if cutting.has_few_cuts:
        return _best_of_all(cutting, microbatches, first)
    if first is None:
        first = _fitting(cutting, random.Random(seed), stops)
    return None if first is None else _moved(cutting, first, cutting.timed + WORK * effort, seed, stops)


def even(layers: Layers, num_stages: int) -> Ints:
    """Return the cut with as many decoders in each stage, the rest in the first ones; mtp is with the loss."""
    decoders = layers.kinds.count("decoder")
    least, more = divmod(decoders, num_stages)
    ends = np.cumsum([least + (stage < more) for stage in range(num_stages)]) + 1
    return np.array([0, *ends[:-1], layers.num_pieces])


def balanced(cutting: Cutting) -> Ints:
    """Return the cut whose stages have nearly the same work: each ends where its share of the whole is reached."""
    layers = cutting.layers
    whole = sum(layers.sums[name] for name in PARTS[KINDS[0]] + PARTS[KINDS[-1]])
    shares = np.asarray(whole)[-1] * np.arange(1, cutting.num_stages) / cutting.num_stages
    inner = [int(np.abs(np.asarray(whole) - share).argmin()) for share in shares]
    last = layers.num_pieces - 1
    at_most = [
        last - layers.has_mtp * (stage <= cutting.num_stages - cutting.num_ranks) for stage in range(1, 1 + len(inner))
    ]
    inner = [min(max(cut, 1), most) for cut, most in zip(inner, at_most, strict=True)]
    return np.array([0, *inner, layers.num_pieces])


def _best_of(cutting: Cutting, cuts: Ints, least: float = math.inf) -> BestCut | None:
    """Return the best of these cuts that fits and is below `least`; of equal ones, that with the evenest ranks."""
    cuts = cuts[cutting.are_valid(cuts)]
    cuts = cuts[cutting.keeps_cap(cuts)]
    if not len(cuts):
        return None
    values = cutting.times(cuts)
    near = np.flatnonzero(values <= values.min() * (1 + EPSILON))
    best = int(near[cutting.work(cuts[near]).argmin()])
    if not values[best] < least:
        return None
    found = BestCut(cuts[best], float(values[best]), False)
    if cutting.best is None or found.value < cutting.best.value:
        cutting.best = found
    return found


def _best_of_all(cutting: Cutting, microbatches: int, best: BestCut | None) -> BestCut | None:
    """Return the best of all cuts; those whose busiest rank alone takes as long as the best so far are not timed."""
    for cuts in _all_cuts(cutting.layers.num_pieces, cutting.num_stages):
        if best is not None:
            cuts = cuts[cutting.work(cuts) * microbatches < best.value * (1 - EPSILON)]
        best = _best_of(cutting, cuts, math.inf if best is None else best.value * (1 - EPSILON)) or best
    return None if best is None else BestCut(best.cut, best.value, True)


def _all_cuts(pieces: int, num_stages: int, at_once: int = 4096) -> Iterator[Ints]:
    every = combinations_with_replacement(range(1, pieces), num_stages - 1)
    while some := list(islice(every, at_once)):
        inner = np.array(some, np.int64).reshape(len(some), num_stages - 1)
        yield np.pad(np.pad(inner, ((0, 0), (1, 0))), ((0, 0), (0, 1)), constant_values=pieces)


def _fitting(cutting: Cutting, rng: random.Random, stops: Callable[[], bool]) -> BestCut | None:
    """Return a cut that keeps to the cap: the balanced one after moves to less memory, or random ones near the best."""
    best, least = _emptied(cutting, balanced(cutting))
    for _ in range(1 + min(RESTARTS, SHIFTS // cutting.num_stages**2)):
        if least <= cutting.memory_cap * (1 + EPSILON):
            return _best_of(cutting, best[None])
        if stops():
            break
        cut, fullest = _emptied(cutting, _kicked(cutting, best, rng))
        if fullest <= least:
            best, least = cut, fullest
    return None


def _emptied(cutting: Cutting, cut: Ints) -> tuple[Ints, float]:
    """Return the cut after moves as long as the fullest rank holds less, and what that holds."""
    while True:
        cuts = np.vstack([cut, _neighbours(cutting, cut)])
        fullest = cutting.graph.peaks(cutting.layers, cuts).max(axis=1)
        if fullest.min() >= fullest[0]:
            return cut, float(fullest[0])
        cut = cuts[int(fullest.argmin())]


def _kicked(cutting: Cutting, cut: Ints, rng: random.Random) -> Ints:
    """Return a random cut, a few moves away."""
    for _ in range(KICKS):
        cuts = _neighbours(cutting, cut)
        cut = cuts[rng.randrange(len(cuts))] if len(cuts) else cut
    return cut


def _moved(cutting: Cutting, best: BestCut, most: int, seed: int, stops: Callable[[], bool]) -> BestCut:
    """Improve a cut by moves, and again from random ones near the best, until the work is done."""
    rng, found = random.Random(seed), _descended(cutting, best, most, stops)
    while cutting.timed < most and not stops():
        start = _best_of(cutting, _kicked(cutting, found.cut, rng)[None])
        if start is None:
            cutting.timed += cutting.graph.num_nodes  # so that the search ends where nothing fits
            continue
        other = _descended(cutting, start, most, stops)
        found = other if other.value < found.value * (1 - EPSILON) else found
    return found


def _descended(cutting: Cutting, best: BestCut, most: int, stops: Callable[[], bool]) -> BestCut:
    """Return the cut from which no move is better."""
    while cutting.timed < most and not stops():
        cutting.remember_path(best.cut)
        cuts = _neighbours(cutting, best.cut)
        better = None
        while len(cuts) and better is None and cutting.timed < most and not stops():
            least = cutting.least_times(cuts)
            order = np.argsort(least, kind="stable")[:TRIED]
            order = order[least[order] < best.value * (1 - EPSILON)]
            if not len(order):
                break
            tried = cuts[order]
            better = _best_of(cutting, tried, best.value * (1 - EPSILON))
            if better is None:
                cutting.remember_path(tried[0])
            cuts = np.delete(cuts, order, axis=0)
        if better is None:
            return best
        best = better
    return best


def _neighbours(cutting: Cutting, cut: Ints) -> Ints:
    """Return the valid cuts that one move away: the cuts between two stages shift by one piece, either way."""
    stages = cutting.num_stages
    first, last = np.triu_indices(stages - 1)
    places = np.arange(stages + 1)
    shifted = ((places > first[:, None]) & (places <= last[:, None] + 1)).astype(np.int64)
    cuts = np.vstack([cut + shifted, cut - shifted])
    return cuts[cutting.are_valid(cuts)]
