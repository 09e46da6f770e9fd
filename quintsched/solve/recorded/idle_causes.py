"""Causes of a step's idle time: by how much it would be shorter without each, in replays of the recorded order.

    messages       take no time
    copies         of activations to the host or to other ranks, and back: take no time
    pauses         of ranks between computations: none
    variation      each computation takes the usual time of its stage and microbatch
    microbatches   all take as long as the mean one
    stages         all take as long as the mean one
    warm-up        what is left beside the work: ranks that wait for their first input, and at the end

The effects of all but the last depend on the order in which they are taken away; each gets its mean over all orders
(its Shapley value), so that all causes and the work add up to the replayed step.

    rank 0  F0 ········· B0     while rank 0 waits for B0, it waits for rank 1 to compute F0 and B0,
    rank 1     F0 B0 ~~▶        then for the message from rank 1

Each rank's idle time is also split by whom it has waited for. An input is followed back: while the rank that makes it
waits itself, that one's input counts, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from math import factorial

import numpy as np

from quintsched.graph.event_graph import Times
from quintsched.solve.recorded.better_order import moved_by
from quintsched.solve.recorded.replay import Parts, RecordedProblem

CAUSES, COPIES = ("messages", "pauses", "variation", "microbatches", "stages"), "copies"
"""Causes that a replay can leave out, and another one for plans that offload or lend."""
WARM_UP = "warm-up"
END, PAUSE = "end", "pause"

Waits = tuple[dict[str, float], ...]
"""For each rank, its idle times, the longest first: for "rank 3" that computes, for a "message 3 to 2", for "copies"
to the host or back, as it pauses itself, or until the "end" of the step."""
KIND_NAMES = ("forward", "backward", "weight half")


@dataclass(frozen=True)
class Cause:
    """Cause of idle time: what it costs, in the unit of the recording, and where most of it arises."""

    name: str
    time: float
    where: str


@dataclass(frozen=True)
class ComputeFactors:
    """Computing times as products: usual time of a stage (kinds, stages, 1), factors of microbatches, and the rest.

    Those of microbatches are (stages, microbatches), equal for all stages of a route.
    """

    usual: Times
    of_microbatches: Times
    rest: Times

    @classmethod
    def from_times(cls, computing: Times, routes: int = 1) -> ComputeFactors:
        """Return the factors of computing times, (kinds, stages, microbatches): medians, robust to single outliers."""
        usual = np.median(computing, axis=2, keepdims=True)
        ways = zip(*(np.split(times, routes, axis=1) for times in (_ratio(computing, usual), usual)), strict=True)
        each = [np.median(ratio[times[..., 0] > 0], axis=0) for ratio, times in ways]
        of_microbatches = np.repeat(each, computing.shape[1] // routes, axis=0)
        usual = np.median(_ratio(computing, of_microbatches), axis=2, keepdims=True) * of_microbatches.mean()
        of_microbatches = of_microbatches / of_microbatches.mean()
        return cls(usual, of_microbatches, _ratio(computing, usual * of_microbatches))

    def computing(self, without: frozenset[str]) -> Times:
        """Return the times without these causes."""
        usual = np.broadcast_to(self.usual.mean(axis=1, keepdims=True), self.usual.shape)
        of_stages = usual if "stages" in without else self.usual
        of_microbatches = np.ones_like(self.of_microbatches) if "microbatches" in without else self.of_microbatches
        rest = np.ones_like(self.rest) if "variation" in without else self.rest
        found: Times = of_stages * of_microbatches * rest
        return found


def _ratio(times: Times, divisor: Times) -> Times:
    divisor = np.broadcast_to(divisor, times.shape)
    found: Times = np.divide(times, divisor, out=np.ones_like(times), where=divisor > 0)
    return found


@dataclass(frozen=True)
class IdleCauses:
    """Causes of the idle time of a recording."""

    recording: RecordedProblem

    @cached_property
    def factors(self) -> ComputeFactors:
        """Factors of the computing times."""
        return ComputeFactors.from_times(self.recording.computing, self.recording.problem.routes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Causes that replays leave out."""
        return (*CAUSES, COPIES) if moved_by(self.recording.plan) else CAUSES

    @cached_property
    def work(self) -> float:
        """Time that a rank computes on average, at the usual times."""
        return float(self.factors.usual.sum()) * self.recording.problem.microbatches / self.recording.problem.pp

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """All causes, from the largest on."""
        names = self.names
        every = (left for k in range(1 + len(names)) for left in combinations(names, k))
        times = {frozenset(left): self._without(left) for left in every}
        found = [Cause(name, _shapley(name, times), self._places[name]()) for name in names]
        least = times[frozenset(names)]
        found.append(Cause(WARM_UP, least - self.work, "until the first and after the last computations of ranks"))
        return tuple(sorted(found, key=lambda cause: -cause.time))

    def _without(self, left_out: Iterable[str]) -> float:
        return self.recording.replay(self.parts(frozenset(left_out))).makespan

    def parts(self, without: frozenset[str]) -> Parts:
        """Return the parts of the step without these causes."""
        parts, none = self.recording.parts, np.zeros(self.recording.shape)
        found = parts._replace(computing=self.factors.computing(without))
        if "messages" in without:
            found = found._replace(receiving=none, wires=np.zeros_like(parts.wires))
        left_out = {"pauses": "pauses", COPIES: "copying"}
        return found._replace(**{part: none for cause, part in left_out.items() if cause in without})

    @property
    def _places(self) -> dict[str, Callable[[], str]]:
        return {
            "messages": self._slowest_wire,
            "pauses": partial(self._rank_with_most, "pauses"),
            COPIES: partial(self._rank_with_most, "copying"),
            "variation": self._outlier,
            "microbatches": self._longest_microbatch,
            "stages": self._heaviest_stage,
        }

    def _slowest_wire(self) -> str:
        """Return the pair of ranks whose messages cost most."""
        parts, wires = self.recording.parts, sorted({gap.wire for gap in self.recording.gaps if gap.wire})
        found = {}
        for wire in wires:
            numbers = [gap.number for gap in self.recording.gaps if gap.wire == wire]
            receiving, lags = parts.receiving.ravel().copy(), parts.wires.copy()
            receiving[numbers], lags[wire] = 0.0, 0.0
            without = parts._replace(receiving=receiving.reshape(parts.receiving.shape), wires=lags)
            found[wire] = self.recording.replay(without).makespan
        if not found:
            return ""
        source, target = min(found, key=lambda wire: found[wire])
        return f"from rank {source} to rank {target}"

    def _rank_with_most(self, part: str) -> str:
        parts, ranks = self.recording.parts, np.array(self.recording.problem.ranks).reshape(self.recording.shape)
        found = [
            self.recording.replay(parts._replace(**{part: np.where(ranks == rank, 0.0, getattr(parts, part))})).makespan
            for rank in range(self.recording.problem.pp)
        ]
        return f"rank {int(np.argmin(found))}"

    def _outlier(self) -> str:
        usual = self.factors.usual * self.factors.of_microbatches
        excess = self.recording.computing - usual
        place = int(np.argmax(excess))
        kind, found = self.recording.problem.place_of(place)[0], self.recording.problem.computation(place)
        times = self.factors.rest.ravel()[place]
        return f"{KIND_NAMES[kind]} {found.microbatch} of stage {found.stage}, {times:.2g} times the usual"

    def _longest_microbatch(self) -> str:
        factors = self.factors.of_microbatches
        longest = self.recording.problem.computation(int(factors.argmax())).microbatch
        return f"microbatch {longest}, {factors.max():.2f} of the mean"

    def _heaviest_stage(self) -> str:
        of_stages = self.factors.usual.sum(axis=(0, 2))
        heaviest = int(of_stages.argmax())
        rank = self.recording.problem.stage_to_pp[heaviest]
        return f"stage {heaviest} on rank {rank}, {of_stages[heaviest] / of_stages.mean():.2f} of the mean"


def _shapley(name: str, times: dict[frozenset[str], float]) -> float:
    """Return the mean reduction of the time by leaving out one cause, over all orders of leaving out."""
    total, count = 0.0, max(map(len, times))
    for before, time in times.items():
        if name not in before:
            weight = factorial(len(before)) * factorial(count - 1 - len(before)) / factorial(count)
            total += weight * (time - times[before | {name}])
    return total


def waits_of(recording: RecordedProblem) -> Waits:
    """Return on whom each rank has waited, until the end of the step."""
    last = max(recording.ends)
    return tuple(_of_rank(recording, order, last) for order in recording.orders)


def _of_rank(recording: RecordedProblem, order: tuple[int, ...], last: float) -> dict[str, float]:
    waited: dict[str, float] = defaultdict(float)
    free = 0.0
    for number in order:
        for name, time in _blame(recording, number, free, recording.starts[number]):
            waited[name] += time
        free = max(free, recording.ends[number])
    waited[END] = last - free
    return {name: time for name, time in sorted(waited.items(), key=lambda one: -one[1]) if time > 0}


def _blame(recording: RecordedProblem, number: int, since: float, until: float) -> Iterator[tuple[str, float]]:
    """Yield for what a computation's rank has waited in the interval, which ends where the computation starts."""
    if until <= since:
        return
    problem = recording.problem
    needed, rank = problem.needs[number], problem.ranks[number]
    source = problem.ranks[needed] if needed >= 0 else rank
    lead, copied = recording.leads[number], recording.copied[number]
    since, until = since + lead, until + lead  # it recomputes first
    made = max(recording.ends[needed], since) if source != rank else since
    if until > made:
        copying = min(max(copied - made, 0.0), until - made)
        yield from [(COPIES, copying)] if copying else []
        yield PAUSE if source == rank else f"message {source} to {rank}", until - made - copying
    if source != rank:
        yield from _blame_rank(recording, source, recording.places[needed], since, min(until, recording.ends[needed]))


def _blame_rank(
    recording: RecordedProblem, rank: int, place: int, since: float, until: float
) -> Iterator[tuple[str, float]]:
    """Yield what a rank has done in the interval, up to the computation at this place of its order."""
    order = recording.orders[rank]
    while until > since:
        start = recording.starts[order[place]]
        if until > start:
            yield f"rank {rank}", until - max(start, since)
            until = start
        before = max(recording.ends[order[place - 1]] if place else 0.0, since)
        yield from _blame(recording, order[place], before, until)
        until, place = min(until, before), place - 1
