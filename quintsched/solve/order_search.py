"""Search for the best order: starting points, local search, and constraint programming where it is installed.

    named schedules ┐                ┌ annealing ┐
    list scheduling ┼─▶ the best ──▶ ┤           ├ in turn, each from the best so far ──▶ the best order, and a bound
    round times     ┘                └ CP-SAT    ┘

Round times: durations as small whole numbers of one unit, for which CP-SAT is quick; the order that is best for these
is nearly so for the real ones. Each placement begins, that of the least bound first; those that lag behind, or whose
bound is not below what is found, are given up.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import monotonic
from types import MappingProxyType

from quintsched.errors import UsageError
from quintsched.simulation.costs import Costs
from quintsched.solve import constraint_programming as exact
from quintsched.solve.list_policies import policies, schedule_by
from quintsched.solve.order_annealing import HOT, anneal
from quintsched.solve.order_problem import EPSILON, Objective
from quintsched.solve.order_timing import has_room, time_orders, timed
from quintsched.solve.periodic.pattern_annealing import PatternAnnealing, repeated_part
from quintsched.solve.periodic.periodic_orders import PeriodicStarts, periodic_placements
from quintsched.solve.periodic.periodic_patterns import unrolled
from quintsched.solve.search_problem import Bound, Orders, Problem, lower_bound
from quintsched.solve.starting_orders import named_orders

POLICIES, MOVES, PROOF, USUAL_SIZE = 100, 5_000, 0.5, 400
"""List schedules of a placement (of so many computations; of larger ones fewer), moves of an annealing, and CP-SAT's
deterministic seconds, for an effort of 1."""
LAGS_BEHIND = 1.05
"""A placement whose order takes longer than the best by this factor after its start is given up."""
COARSE = (1, 2, 3)
"""Numbers of units that the shortest computation takes in round times."""
ENOUGH = 1e-9
AFTER_INTERRUPT_S = 1.0
"""Most seconds of a second search, where Ctrl-C has ended the first."""
AGAIN_S = 0.25
"""Seconds from the end of the time to an interrupt, and from one to the next."""
PERIOD = "repeated period"
"""Origin of orders in which each microbatch runs as the one before it."""
PLAIN = "1f1b"
"""Schedule that is tried first: it is there at once."""
MANY = 4
"""Microbatches per rank from which on orders that repeat are tried."""


@dataclass
class PlacementSearch:
    """Search with one placement: its problem, the best orders so far, and where they came from."""

    problem: Problem
    costs: Costs | None
    objective: Objective
    bound: Bound
    value: float = math.inf
    orders: Orders = ()
    origin: str = ""
    rounds: int = 0
    """Number of annealings."""
    placement: PeriodicStarts | None = None
    """Placement of the shortest period."""
    annealing: PatternAnnealing | None = None
    """Annealing of patterns that repeat."""
    proved: float = -math.inf
    """Lower bound that CP-SAT has proved; the one with a certificate is `bound`."""

    @property
    def is_optimal(self) -> bool:
        """Whether nothing better exists with this placement."""
        return self.value <= max(self.bound.value, self.proved) * (1 + ENOUGH)


@dataclass
class OrderSearch:
    """State of a search; `log` has (seconds, value, bound, origin) of each improvement."""

    objective: Objective
    seed: int
    ends_s: float
    told: Callable[[PlacementSearch, float], None]
    began_s: float = field(default_factory=monotonic)
    log: list[tuple[float, float, float, str]] = field(default_factory=list)
    attempts: list[PlacementSearch] = field(default_factory=list)
    best: PlacementSearch | None = None
    is_interrupted: bool = False
    """Whether Ctrl-C has ended it."""

    @property
    def found(self) -> PlacementSearch:
        """Best attempt of a search that has timed an order."""
        assert self.best is not None, "one microbatch after the other has room"
        return self.best

    @property
    def value(self) -> float:
        """Least time that is found."""
        return self.best.value if self.best else math.inf

    def can_win(self, attempt: PlacementSearch) -> bool:
        """Whether an order with an attempt's placement may be better than the best one."""
        return attempt.bound.value < self.value - attempt.problem.tick

    @property
    def is_over(self) -> bool:
        """Whether its time is over."""
        return monotonic() > self.ends_s

    def keep(self, attempt: PlacementSearch, orders: list[list[int]], value: float, origin: str) -> bool:
        """Keep orders that are better than an attempt's; return whether the search goes on."""
        least, best = attempt.problem.tick, self.value
        if value < attempt.value - least:
            attempt.value, attempt.orders = value, tuple(map(tuple, orders))
            attempt.origin = origin
            if value < best - least:
                self.best = attempt
                taken = monotonic() - self.began_s
                self.log.append((taken, value, max(attempt.bound.value, attempt.proved), origin))
                self.told(attempt, taken)
        return not self.is_over and not attempt.is_optimal

    def try_orders(self, attempt: PlacementSearch, orders: list[list[int]] | None, origin: str) -> None:
        """Time orders that keep to the caps, and keep them where they are better."""
        fits = orders and all(has_room(attempt.problem, rank, order) for rank, order in enumerate(orders))
        timing = time_orders(attempt.problem, orders) if orders and fits else None
        if orders and timing:
            self.keep(attempt, orders, timing.value(self.objective), origin)


def search(
    problems: Iterable[tuple[Problem, Costs | None]],
    objective: Objective,
    *,
    seed: int,
    effort: int,
    seconds: float,
    told: Callable[[PlacementSearch, float], None] = lambda attempt, seconds: None,
    known: Mapping[str, Orders] = MappingProxyType({}),
    after: OrderSearch | None = None,
) -> OrderSearch:
    """Search with each problem, of its costs (one for each placement); an interrupt ends it with the best so far.

    `known` are more starting points, by name, for a search with one problem; `after` is a search whose best is to be
    beaten. Raises `UsageError` where the time is over before one order was timed.
    """
    state = OrderSearch(objective, seed, monotonic() + seconds, told)
    if after is not None:
        state.best, state.log, state.began_s = after.best, after.log, after.began_s
    try:
        with interrupted_at(state.ends_s):
            attempts = [PlacementSearch(*each, objective, lower_bound(each[0], objective)) for each in problems]
            state.attempts = sorted(attempts, key=lambda attempt: attempt.problem.num_stages)
            for begin in (partial(_try_known, known=known), _try_periods, _try_named):
                for attempt in filter(state.can_win, state.attempts):
                    begin(state, attempt)
                state.attempts.sort(key=lambda attempt: attempt.bound.value)
            _anneal_in_turns(state, effort)
            for improve in (_try_lists, _improve_by_moves):
                for attempt in filter(state.can_win, state.attempts):
                    improve(state, attempt, effort)
            for attempt in sorted(state.attempts, key=lambda attempt: attempt.value):
                if attempt.value <= state.value * LAGS_BEHIND and state.can_win(attempt):
                    _finish(state, attempt, effort)
    except KeyboardInterrupt:
        state.is_interrupted = not state.is_over
        if state.best is None and state.is_interrupted:
            raise
        _settle(state)
    if state.best is None:
        raise UsageError("the time was over before one order of these sizes was timed; allow for more seconds")
    state.attempts += after.attempts if after else []
    return state


@contextlib.contextmanager
def interrupted_at(ends_s: float) -> Iterator[None]:
    """Interrupt the main thread, as Ctrl-C does, where a part of the search does not look at the clock in time.

    It comes a moment later than `ends_s`, so that most searches end by themselves, and again until the thread leaves:
    Python drops an exception that is raised while it collects garbage, and would report that it did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    lock, is_left, woken, report = threading.Lock(), False, threading.Event(), sys.unraisablehook

    def interrupt() -> None:
        wait_s = ends_s + AGAIN_S - monotonic()
        while not woken.wait(min(max(wait_s, 0.0), threading.TIMEOUT_MAX)):
            with lock:
                if is_left:
                    return
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    _thread.interrupt_main()
            wait_s = AGAIN_S

    def report_others(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            report(dropped)

    try:
        sys.unraisablehook = report_others
        threading.Thread(target=interrupt, daemon=True).start()
        yield
    finally:
        is_left, sys.unraisablehook = True, report  # first, and by no call: an interrupt is raised in calls
        woken.set()
        with lock:
            woken.is_set()  # a call: an interrupt that is under way is raised here, not behind the caller's `except`


def _settle(state: OrderSearch) -> None:
    """Time the best orders again, which an interrupt may have cut off from their value."""
    if state.best is not None:
        state.best.value = timed(state.best.problem, state.best.orders).value(state.objective)


def _try_known(state: OrderSearch, attempt: PlacementSearch, known: Mapping[str, Orders]) -> None:
    """Try known orders, a plain one, and one microbatch after the other, which always fits."""
    problem = attempt.problem
    for name, given in (*known.items(), *named_orders(problem, None, PLAIN), ("one by one", problem.one_by_one)):
        if state.is_over:
            return
        state.try_orders(attempt, list(map(list, given)), name)


def _is_long(problem: Problem) -> bool:
    """Return whether orders that repeat are tried; with two routes also in short steps: few schedules are known."""
    return problem.microbatches >= (MANY if problem.routes == 1 else 1) * problem.pp


def _try_periods(state: OrderSearch, attempt: PlacementSearch) -> None:
    """Try orders that repeat, in long steps."""
    problem = attempt.problem
    if _is_long(problem):
        for found in periodic_placements(problem, random.Random(state.seed), lambda: _is_done(state, attempt)):
            attempt.placement = found
            state.try_orders(attempt, unrolled(problem, found.starts_of(problem.microbatches)), PERIOD)


def _anneal_in_turns(state: OrderSearch, effort: int) -> None:
    """Anneal patterns that repeat in rounds, with each placement in turn; after the first, with those that are near."""
    for number in range(effort + 1):
        for attempt in sorted(state.attempts, key=lambda attempt: attempt.value):
            is_near = number == 0 or attempt.value <= state.value * LAGS_BEHIND
            if is_near and state.can_win(attempt):
                _anneal_periods(state, attempt, number, is_last=number == effort)


def _anneal_periods(state: OrderSearch, attempt: PlacementSearch, number: int, *, is_last: bool) -> None:
    """Anneal patterns that repeat, in long steps: from the shortest one that was placed, and from the best orders."""
    problem = attempt.problem
    if not problem.are_alike or not _is_long(problem) or _is_done(state, attempt):
        return
    rng, stops = random.Random(state.seed + number), partial(_is_done, state, attempt)
    if attempt.annealing is None:
        timing, placed = time_orders(problem, attempt.orders), attempt.placement
        firsts = [(placed.starts_of(1), placed.period)] if placed else []
        if timing and attempt.origin != PERIOD:
            firsts += repeated_part(problem, timing.starts)
        attempt.annealing = PatternAnnealing(problem, firsts, rng, stops)
    for orders in attempt.annealing.round(number, rng, stops, is_last=is_last):
        state.try_orders(attempt, orders, "annealed period")


def _is_done(state: OrderSearch, attempt: PlacementSearch) -> bool:
    return state.is_over or attempt.is_optimal


def _try_named(state: OrderSearch, attempt: PlacementSearch) -> None:
    """Try named schedules."""
    for name, orders in named_orders(attempt.problem, attempt.costs):
        if _is_done(state, attempt):
            return
        state.try_orders(attempt, orders, name)


def _try_lists(state: OrderSearch, attempt: PlacementSearch, effort: int) -> None:
    """Try list schedules."""
    rng = random.Random(state.seed)
    count = max(16, POLICIES * effort * USUAL_SIZE // max(len(attempt.problem.durations), USUAL_SIZE))
    for policy in islice(policies(attempt.problem, rng), count):
        if _is_done(state, attempt):
            return
        state.try_orders(attempt, schedule_by(attempt.problem, policy), "list schedule")


def _improve_by_moves(state: OrderSearch, attempt: PlacementSearch, effort: int, rounds: int = 2) -> None:
    """Anneal from the best orders, with other random numbers each time."""
    for _ in range(rounds):
        if _is_done(state, attempt):
            return
        attempt.rounds += 1
        anneal(
            attempt.problem,
            [list(order) for order in attempt.orders],
            state.objective,
            random.Random(state.seed + attempt.rounds),
            hot=HOT[attempt.rounds % len(HOT)],
            moves=MOVES * effort,
            ends_s=state.ends_s,
            found=lambda orders, value: state.keep(attempt, orders, value, "annealing"),
        )


def _finish(state: OrderSearch, attempt: PlacementSearch, effort: int) -> None:
    """Solve with round times and with real ones, and anneal between."""
    problem = attempt.problem
    can_solve = exact.is_installed() and len(problem.durations) <= exact.MOST_COMPUTATIONS
    rounded = [_rounded(problem, units) for units in COARSE] if can_solve else []
    for simpler in filter(None, rounded):
        if not _is_done(state, attempt):
            _solve(state, attempt, simpler, PROOF * effort)
            _improve_by_moves(state, attempt, effort)
    if can_solve and not _is_done(state, attempt):
        _solve(state, attempt, problem, PROOF * effort)
    _improve_by_moves(state, attempt, effort, rounds=8)
    if can_solve and not _is_done(state, attempt):
        _solve(state, attempt, problem, 4 * PROOF * effort)


def _rounded(problem: Problem, units: int) -> Problem | None:
    """Return the problem with durations as whole numbers, the shortest `units`; None if they are such multiples."""
    times = [time for time in problem.durations if time > 0]
    unit = min(times, default=1.0) / units
    if all(abs(time / unit - round(time / unit)) < EPSILON for time in (*times, *problem.lags, *problem.leads)):
        return None
    durations = tuple(float(max(round(time / unit), time > 0)) for time in problem.durations)
    lags, leads = (tuple(float(round(time / unit)) for time in table) for table in (problem.lags, problem.leads))
    return replace(problem, durations=durations, lags=lags, leads=leads)


def _solve(state: OrderSearch, attempt: PlacementSearch, problem: Problem, effort: float) -> None:
    """Let CP-SAT improve the best orders, under the times of `problem`."""
    timing = time_orders(problem, attempt.orders)
    if timing is None:
        return
    answer = exact.improve(
        problem,
        timing.starts,
        timing.value(state.objective),
        state.objective,
        seed=state.seed,
        effort=effort,
        seconds=state.ends_s - monotonic(),
        stops=lambda: state.is_over,
    )
    if answer.bound is not None and problem is attempt.problem and not problem.grows and problem.halves is None:
        attempt.proved = max(attempt.proved, answer.bound)
    state.try_orders(attempt, answer.orders, "constraint programming")
    if answer.is_interrupted:
        raise KeyboardInterrupt
