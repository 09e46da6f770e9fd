"""Time of an order of computation: each computation starts when its rank is free and its input has arrived; one that
first recomputes starts before that, by the time of the recomputation.

Messages from one rank to another go one after the other, in the order in which the receiver needs them: as in a plan,
and as `simulate` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.solve.order_problem import EPSILON, Objective
from quintsched.solve.search_problem import Orders, Problem


@dataclass(frozen=True)
class Timing:
    """Start of each computation, the computation that its input has waited for, and the span of each rank.

    `sources` has for each computation the one at whose end the last uninterrupted series of messages began that brought
    its input (-1: none); `sequence` all computations, each after those that it waits for.
    """

    starts: list[float]
    sources: list[int]
    sequence: list[int]
    spans: list[float]
    makespan: float

    def value(self, objective: Objective) -> float:
        """Return the time that is minimised."""
        return self.makespan if objective == "makespan" else max(self.spans)


def time_orders(problem: Problem, orders: list[list[int]] | Orders) -> Timing | None:
    """Return the times of these orders; None if they wait for each other in a circle."""
    durations, needs, lags, ranks = problem.durations, problem.needs, problem.lags, problem.ranks
    leads = problem.leads
    starts, ends = [0.0] * len(durations), [-1.0] * len(durations)
    places, free, waiting = [0] * problem.pp, [0.0] * problem.pp, dict[int, int]()
    sources, wires, last = list(needs), problem.wires, dict[int, tuple[float, int]]()
    ready, sequence = list(range(problem.pp)), list[int]()
    while ready:
        rank = ready.pop()
        order, place, now = orders[rank], places[rank], free[rank]
        while place < len(order):
            number = order[place]
            needed = needs[number]
            if needed >= 0:
                end = ends[needed]
                if end < 0:
                    waiting[needed] = rank
                    break
                wire = wires[number]
                if wire >= 0:
                    sent, source = last.get(wire, (0.0, -1))
                    if sent > end:
                        end, sources[number] = sent, source
                    end += lags[number]
                    last[wire] = (end, sources[number])
                end -= leads[number]
                if end > now:
                    now = end
            starts[number] = now
            now += durations[number]
            ends[number] = now
            sequence.append(number)
            place += 1
            other = waiting.pop(number, None)
            if other is not None and other != ranks[number]:
                ready.append(other)
        places[rank], free[rank] = place, now
    if len(sequence) < len(durations):
        return None
    spans = [end - starts[order[0]] if order else 0.0 for end, order in zip(free, orders, strict=True)]
    return Timing(starts, sources, sequence, spans, max(free))


def timed(problem: Problem, orders: list[list[int]] | Orders) -> Timing:
    """Return the times of orders that are known to run."""
    timing = time_orders(problem, orders)
    assert timing is not None, "an order that has run does not wait for itself"
    return timing


def has_room(problem: Problem, rank: int, order: list[int]) -> bool:
    """Return whether a rank's order keeps to its cap, which its own order decides alone."""
    return problem.peak(order) <= problem.caps[rank] * (1 + EPSILON)
