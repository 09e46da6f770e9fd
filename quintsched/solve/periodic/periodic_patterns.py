"""Patterns that repeat: the order in which each rank computes some microbatches, around a circle, and its least period.

    rank 0   ▕ F0  I1  F1  W1  I0  W0 ▏ F0  I1 …       two microbatches a turn; I1 belongs to a microbatch that began
    rank 1   ▕ I0  W0  F0  I1  W1  F1 ▏ I0  W0 …       three turns ago: so many are held

A computation waits for the one before it on its rank, and for the one that it needs; each from the same turn or from an
earlier one. The least period is the greatest ratio, among all circles of such waits, of their time to their turns
(Reiter 1968), which policy iteration finds (Howard 1960; Cochet-Terrasson et al. 1998). How much a rank holds depends
on its own order alone.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import chain

from quintsched.solve.order_problem import EPSILON
from quintsched.solve.search_problem import Problem

ROUNDS = 1_000
"""Most rounds of policy iteration, which needs few."""

Starts = list[list[float]]
"""Moments at which microbatches start, for each row: kind and stage."""


class Pattern:
    """Pattern of some microbatches; a computation is `row * length + microbatch`, with rows by kind and stage.

    Attributes:
        problem: the problem, whose microbatches are alike.
        length: number of microbatches in a turn.
        orders: the computations of each rank, in the order of a turn.
        turns: number of the turn, for each computation, in which that of the first microbatches runs.
        period: least time of a turn; infinity where computations wait for each other in a circle.
        circle: computations of a circle of waits that takes this time.
        begins: start of each computation within its turn.
    """

    def __init__(self, problem: Problem, starts: Starts, period: float) -> None:
        """Take over the orders of one turn, in which rows start at these moments, and again a period later."""
        self.problem, self.length = problem, len(starts[0])
        rows = [row for row in range(3 * problem.num_stages) for _ in range(self.length)]
        first = [row * problem.microbatches for row in rows]
        self.ranks = [problem.ranks[number] for number in first]
        self.needs = [self._number(problem.needs[number], place) for place, number in enumerate(first)]
        self.followers: list[list[int]] = [[] for _ in rows]
        for number, needed in enumerate(self.needs):
            if needed >= 0:
                self.followers[needed].append(number)
        tables = problem.durations, problem.delays, problem.holds, problem.rises
        self._durations, self._delays, self._holds, self._rises = ([table[n] for n in first] for table in tables)
        self._before, self._after, self._is_first = [0] * len(rows), [0] * len(rows), [False] * len(rows)
        self._waits_for_need = [needed >= 0 for needed in self.needs]
        self.turns = [math.floor(start / period + EPSILON) for row in starts for start in row]
        self.begins = [start - period * turn for start, turn in zip(chain(*starts), self.turns, strict=True)]
        self.orders: list[list[int]] = []
        for rank in range(problem.pp):
            mine = [number for number, where in enumerate(self.ranks) if where == rank]
            self.orders.append(sorted(mine, key=self.begins.__getitem__))
            self._link(rank)
        self.period, self.circle = math.inf, list[int]()
        self._time()

    def _number(self, needed: int, place: int) -> int:
        """Return the computation that the one at a place needs; -1: none."""
        return -1 if needed < 0 else needed // self.problem.microbatches * self.length + place % self.length

    def starts(self, turns: int = 1) -> Starts:
        """Return the moments at which each row's microbatches start, in so many turns."""
        every = [begin + turn * self.period for begin, turn in zip(self.begins, self.turns, strict=True)]
        rows = [every[first : first + self.length] for first in range(0, len(every), self.length)]
        return [[start + turn * self.period for turn in range(turns) for start in row] for row in rows]

    def has_room(self, rank: int) -> bool:
        """Return whether a rank keeps to its cap."""
        order, most = self.orders[rank], self.problem.caps[rank] * (1 + EPSILON)
        held = -sum(self._holds[number] * self.turns[number] for number in order)
        for number in order:
            if held + self._rises[number] > most:
                return False
            held += self._holds[number]
        return True

    def jump(self, number: int, places: int, most: float) -> bool:
        """Move a computation across others of its rank, to earlier ones if negative, and return whether it has moved.

        It has not where the rank would break its cap, or the period be longer than `most`.
        """
        rank = self.ranks[number]
        order, turn, begin = self.orders[rank], self.turns[number], self.begins[number]
        place, others = order.index(number), [other for other in order if other != number]
        over, to = divmod(place + places, len(others))
        self.orders[rank] = [*others[:to], number, *others[to:]]
        self.turns[number] += over
        self._link(rank)
        if self.has_room(rank) and self._allows(number, most):
            kept = self.orders, self.turns, self.begins, self._waits_for_need, self.period, self.circle
            self.orders, self.turns, self.begins = list(self.orders), list(self.turns), list(self.begins)
            self._waits_for_need = list(self._waits_for_need)
            self._time()
            if self.period < math.inf:
                return True
            self.orders, self.turns, self.begins, self._waits_for_need, self.period, self.circle = kept
        self.orders[rank], self.turns[number], self.begins[number] = order, turn, begin
        self._link(rank)
        return False

    def _link(self, rank: int) -> None:
        order = self.orders[rank]
        for place, number in enumerate(order):
            self._before[number] = order[place - 1]
            self._after[order[place - 1]] = number
            self._is_first[number] = not place

    def _allows(self, number: int, period: float) -> bool:
        """Return whether the period is long enough after a computation has jumped, where it was so for all others.

        A circle of waits that takes too long has this computation in it. So it starts as soon as it can, what waits for
        it is put off, and so on, the longest delay first; none may come back to it (Ramalingam et al. 1999).
        """
        begins, turns, durations, delays = self.begins, self.turns, self._durations, self._delays
        before, needed, slack = self._before[number], self.needs[number], EPSILON * period
        begin = begins[before] + durations[before] - period * self._is_first[number]
        if needed >= 0:
            turned = period * (turns[number] - turns[needed])
            begin = max(begin, begins[needed] + durations[needed] + delays[number] - turned)
        begins[number] = begin
        late, waiting = {number: 0.0}, [(0.0, number)]
        while waiting:
            by, one = heappop(waiting)
            if late[one] > slack - by:
                continue
            end, turn, other = begins[one] + durations[one] - by, turns[one], self._after[one]
            reached = [(other, end - begins[other] - period * self._is_first[other])]
            reached += [
                (later, end + delays[later] - begins[later] - period * (turns[later] - turn))
                for later in self.followers[one]
            ]
            for other, delay in reached:
                if delay > late.get(other, 0.0) + slack:
                    if other == number:
                        return False
                    late[other] = delay
                    heappush(waiting, (-delay, other))
        return True

    def _time(self) -> None:
        """Find the least period, a circle that takes it, and all starts."""
        self.period = -math.inf
        for _ in range(ROUNDS):
            waits = self._waits()
            longest, circle = _longest_circle(waits)
            if longest == math.inf:
                self.period = math.inf
                return
            if longest * (1 - EPSILON) > self.period:
                self.period, self.circle = longest, circle
                self._begin_after(waits, circle[0])
            if not self._wait_longer():
                self._begin_turns_together()
                return
        raise AssertionError(f"no least period of {len(self.turns)} computations after {ROUNDS} rounds")

    def _waits(self) -> list[tuple[int, float, int]]:
        """Return for each computation the one that it waits for, for how long from its start, and over how many turns.

        That is the one before it, or the one that it needs.
        """
        before, needs, turns, durations = self._before, self.needs, self.turns, self._durations
        return [
            (needs[one], durations[needs[one]] + self._delays[one], turns[one] - turns[needs[one]])
            if by_need
            else (before[one], durations[before[one]], int(self._is_first[one]))
            for one, by_need in enumerate(self._waits_for_need)
        ]

    def _begin_after(self, waits: list[tuple[int, float, int]], root: int) -> None:
        """Set the starts of all computations whose waits lead to `root`."""
        begins, leads = self.begins, dict.fromkeys([root], True)
        for first in range(len(waits)):
            path, on_path, one = list[int](), set[int](), first
            while one not in leads and one not in on_path:
                path.append(one)
                on_path.add(one)
                one = waits[one][0]
            leads_there = leads.get(one, False)
            for one in reversed(path):
                leads[one] = leads_there
                if leads_there:
                    other, took, turned = waits[one]
                    begins[one] = begins[other] + took - self.period * turned

    def _wait_longer(self) -> bool:
        """Let computations that begin too early wait for what forbids it; return whether any did."""
        begins, period, turns, durations, before = self.begins, self.period, self.turns, self._durations, self._before
        slack, any_did = EPSILON * period, False
        for one, needed in enumerate(self.needs):
            other = before[one]
            begin = begins[other] + durations[other] - period * self._is_first[one]
            if begin > begins[one] + slack:
                begins[one], self._waits_for_need[one], any_did = begin, False, True
            if needed >= 0:
                begin = begins[needed] + durations[needed] + self._delays[one] - period * (turns[one] - turns[needed])
                if begin > begins[one] + slack:
                    begins[one], self._waits_for_need[one], any_did = begin, True, True
        return any_did

    def _begin_turns_together(self) -> None:
        """Let the turns of all ranks begin at the same moment, so that nothing waits for a later turn."""
        for rank, order in enumerate(self.orders):
            over = [math.floor(self.begins[one] / self.period + EPSILON) for one in order]
            for one, turned in zip(order, over, strict=True):
                self.turns[one] += turned
                self.begins[one] -= turned * self.period
            split = over.index(over[-1])
            self.orders[rank] = order[split:] + order[:split]
            self._link(rank)


def unrolled(problem: Problem, starts: Starts) -> list[list[int]]:
    """Return the orders of all microbatches of a problem, whose rows start at these moments."""
    orders = [list[tuple[float, int]]() for _ in range(problem.pp)]
    for row, every in enumerate(starts):
        first, rank = row * problem.microbatches, problem.stage_to_pp[row % problem.num_stages]
        orders[rank] += [(every[microbatch], first + microbatch) for microbatch in range(problem.microbatches)]
    return [[number for _, number in sorted(order)] for order in orders]


def _longest_circle(waits: list[tuple[int, float, int]]) -> tuple[float, list[int]]:
    """Return the greatest ratio of time to turns among the circles (infinity: no turns), and its computations."""
    seen, longest, best = [-1] * len(waits), -math.inf, list[int]()
    for first in range(len(waits)):
        one = first
        while seen[one] < 0:
            seen[one] = first
            one = waits[one][0]
        if seen[one] != first:
            continue
        circle, time, turns, other = list[int](), 0.0, 0, one
        while not circle or other != one:
            circle.append(other)
            other, took, turned = waits[other]
            time += took
            turns += turned
        ratio = time / turns if turns > 0 else math.inf
        if ratio > longest:
            longest, best = ratio, circle
    return longest, best
