"""Makespan of a step's computation under a schedule, and activations in flight, for many strategies at once.

    staged            makespan of pipelines with arbitrary stages, by simulation (`event_graph_levels`)
    bound_of          bound for searches: the slowest rank's work, plus the way down to that rank before it, and the
                      way up after it
    exposed_reductions  time of gradient reduction after the end of all computation

Times are seconds per microbatch; n is the number of pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quintsched.errors import UsageError
from quintsched.ir.mesh import Mesh
from quintsched.schedules import find_schedule
from quintsched.schedules.kit.bare_order import order_of_computation
from quintsched.simulation import simulated_activation_memory
from quintsched.simulation.costs import Costs
from quintsched.strategies.prediction.pipeline.closed_forms import CLOSED_FORMS
from quintsched.strategies.prediction.pipeline.event_graph_levels import levels_of
from quintsched.strategies.prediction.pipeline.runs_of_equal_ranks import Each, Pipelines, RowNumbers, Values, chunked

SIMULATED_DEPTHS = 3
"""Fewest simulated microbatches, in units of the pipeline's depth; once the state is steady, it repeats."""
FEWEST = 8
"""Minimum number of microbatches of a repetition."""
STEADY = 1e-9
"""Relative error of rounding in the time that the steady state adds."""
MOST_SIMULATED = 2**21
"""Maximum number of passes of stages that are simulated, which takes some 20 seconds."""
WHOLE_BACKWARDS = frozenset({"gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "bfs"})
"""Schedules under which each rank ends with a full backward of its first stage, on which earlier ranks depend."""

CHUNK_BY_CHUNK = frozenset({"bfs"})
"""Schedules under which a rank runs all microbatches through a chunk before the next chunk."""


def has_closed_form(
    schedule: str, microbatches: npt.ArrayLike = np.inf, pp: npt.ArrayLike = 1
) -> npt.NDArray[np.bool_]:
    """Return whether a closed form gives the makespan of such pipelines: within 1 % of a simulation, mostly exactly."""
    name = find_schedule(schedule).name
    filled = np.asarray(microbatches) >= np.asarray(pp)
    return np.asarray((name in CLOSED_FORMS) & (filled | (name != "zb-h1")))


def staged(
    schedule: str,
    pp: int,
    microbatches: int,
    chunks: int | None,
    durations: Values,
    reduction: Values | None = None,
    tied: tuple[int, ...] = (),
) -> tuple[Values, Values]:
    """Simulate n pipelines of one shape, with arbitrary stages.

    Of many microbatches, only as many are simulated as are needed until the steady state repeats.

    Args:
        schedule: name of the schedule.
        pp: pipeline ranks.
        microbatches: per pipeline.
        chunks: stages per rank; None: the fewest that the schedule takes.
        durations: times of each stage, (kinds, stages, n), in the order of `TIMED_CLASSES`.
        reduction: time of its gradient reduction, (stages, n); None: no time.
        tied: stages that share weights.

    Returns:
        End of the last computation, and the time of gradient reduction beyond it, (n,) each.

    Raises:
        UsageError: too many stages and microbatches to simulate.
    """

    def ends_of(number: int, which: RowNumbers) -> Values:
        require_simulable(schedule, pp, number, durations.shape[1])
        levels = levels_of(schedule, pp, number, chunks)
        ends = levels.ends(durations[..., which])
        computed = ends.max(axis=0)
        reduced = computed if reduction is None else levels.reduced(ends, reduction[:, which], tied)
        return np.stack([computed, np.maximum(computed, reduced)])

    pace = pace_of(schedule, pp, chunks, durations[:3].sum(axis=0))
    makespan, reduced = repeated(pp, microbatches, pace, ends_of)
    return makespan, reduced - makespan


def repeated(pp: int, microbatches: int, pace: Values, ends_of: Callable[[int, RowNumbers], Values]) -> Values:
    """Return the ends of all microbatches, (…, n), from `ends_of` fewer of some pipelines, as the steady state repeats.

    In it the last of these ends comes no earlier, for each microbatch, than by `pace`, (n,): until then, the times of
    other ranks or reductions are still ahead of the busiest rank's work, and twice as many microbatches are taken. Each
    pipeline goes as deep as it has to by itself, so that its times are the same alone and among others.
    """
    depths, left, found = SIMULATED_DEPTHS, np.arange(pace.size), np.zeros(0)
    while len(left):
        few, more, times = repetition(pp, microbatches, depths)
        longer = ends_of(more, left)
        gained = longer - ends_of(few, left) if times else np.zeros_like(longer)
        steady = (gained[-1] >= (1 - STEADY) * (more - few) * pace[left]) | (times == 0)
        found = found if found.size else np.zeros((*longer.shape[:-1], pace.size))
        found[..., left[steady]] = (longer + times * gained)[..., steady]
        left, depths = left[~steady], 2 * depths
    return found


def pace_of(schedule: str, pp: int, chunks: int | None, work: npt.ArrayLike) -> Values:
    """Return the work of the busiest rank for a microbatch, (n,); `work` is that of each stage, (stages, n)."""
    found, work = find_schedule(schedule), np.asarray(work, np.float64)
    of_ranks = np.zeros((pp, *work.shape[1:]))
    np.add.at(of_ranks, list(found.placed(pp, chunks)), work)
    return np.asarray(of_ranks.max(axis=0) / (1 + found.bidirectional))


def require_simulable(schedule: str, pp: int, microbatches: int, num_stages: int) -> None:
    """Raise `UsageError` if a simulation would take too long, counting a forward and two halves per microbatch."""
    passes = 3 * num_stages * microbatches
    if passes > MOST_SIMULATED:
        raise UsageError(
            f"{schedule} with --pp {pp} takes a simulation of {passes} passes of stages; at most {MOST_SIMULATED} are "
            f"simulated: take fewer pipeline ranks, or a schedule with a closed form ({', '.join(CLOSED_FORMS)}) "
            "and no --simulate"
        )


def repetition(pp: int, microbatches: int, depths: int = SIMULATED_DEPTHS) -> tuple[int, int, int]:
    """Return (few, more, times): step time = time of `more` microbatches + `times` x (time of `more` - time of `few`).

    `times` is 0 if `more` is all microbatches.
    """
    step = pp * -(-FEWEST // pp)
    few = depths * step + microbatches % step
    if microbatches <= few + step:
        return few, microbatches, 0
    return few, few + step, (microbatches - few) // step - 1


def bound_of(schedule: str, s: Pipelines, alike: npt.NDArray[np.bool_] | bool = True) -> Values:
    """Return a lower bound on the step time of these pipelines, (n,).

    If the stages of a rank are not `alike`, the ways down and up to a rank are left out.
    """
    whole = find_schedule(schedule).name in WHOLE_BACKWARDS
    f, i, b = (Each(s, chunk(s, name)) for name in ("f", "i", "b"))
    ends = s.first.f + s.first.i + s.last.f + s.last.i
    found = s.v * (f.total + i.total) + ends
    for place in s.places:
        apart = (place.rank > 0) & alike
        home = b.before(place) + s.first.b if whole else 0.0
        ways = np.where(apart, f.before(place) + s.first.f + home, 0.0)
        busy = s.m * (s.f[place.run] + s.b[place.run]) + ways
        found = np.where(place.exists, np.maximum(found, busy), found)
    return np.asarray(found)


def reduction_bound(s: Pipelines, makespan: Values, least: Values, ends: Values) -> Values:
    """Return a lower bound on the time of gradient reduction beyond a bound on the makespan, (n,).

    A rank reduces one stage at least after all its work, which begins after the way down to it. This takes `least` for
    ranks of each run, (K, n), without the `ends` that only the first and the last stage have.
    """
    f, own = Each(s, chunk(s, "f")), np.maximum(chunked(s, least * s.v, *(ends * s.v)), 0.0)
    found = np.zeros_like(s.p)
    for place in s.places:
        begun = np.where(place.rank > 0, f.before(place) + s.first.f, 0.0)
        done = begun + s.m * (s.f[place.run] + s.b[place.run]) + own[place.run]
        found = np.where(place.exists, np.maximum(found, done - makespan), found)
    return found


def exposed_reductions(
    schedule: str, s: Pipelines, reduction: Values, first: Values, last: Values, *, tied: bool = False
) -> Values:
    """Return the time of gradient reduction after the end of all computation, (n,).

    A stage's reduction starts after its last backward, beside other computations, and after those of later stages.

        rank 0   B of chunk 1 ... ▶ B of chunk 0 ... ▶
                                  ▶ reduction of 1 ▶ of 0 ▶      the part after the last computation is exposed
        rank 1   B ... ▶ its reductions start earlier

    Args:
        schedule: its name.
        s: the pipelines: a rank's reductions run beside all that it and, on the gradients' way up, earlier ranks do.
        reduction: time for all stages of a rank of each run, (K, n), in seconds.
        first: part of it for the first stage alone, (n,).
        last: part of it for the last stage alone.
        tied: whether the first and the last stage share weights, so that both wait for the first one's last backward.
    """
    late = find_schedule(schedule).name not in WHOLE_BACKWARDS
    b, up, w = chunk(s, "b"), Each(s, chunk(s, "i" if late else "b")), chunk(s, "w")
    own = chunked(s, reduction, first, last)
    found = np.zeros_like(s.p)
    rounds = s.m if find_schedule(schedule).name in CHUNK_BY_CHUNK else s.p  # of a chunk's backwards, at the end
    ring = Each(s, b).total  # on its way over all ranks
    for place in s.places:
        top, run = place.rank == 0, place.run
        sooner = up.before(place) + np.where(top, 0.0, s.first.i if late else s.first.b)
        sooner = np.maximum(sooner - late * place.rank * w[run], 0.0)
        of_first = own[run] + top * first
        turn = np.maximum(rounds * b[run], ring)
        beside = np.where(s.v > 1, (s.v - 1) * turn + top * rounds * s.first.b, 0.0)
        exposed = np.maximum(of_first, reduction[run] - beside) - sooner
        if tied:
            alone = (s.p == 1) & (s.v > 1)  # both on one rank
            apart = reduction[run] - own[run] - last - alone * of_first  # of its other stages, which come before
            done = np.maximum(np.minimum(apart, own[run]), apart - np.maximum(s.v - 2, 0) * turn) - sooner
            before = np.maximum(np.where(alone, apart - (s.v - 2) * turn, done), 0.0) + alone * of_first
            exposed = np.maximum(exposed, np.where(place.rank == s.p - 1, before + own[run] + last, 0.0))
        found = np.where(place.exists, np.maximum(found, exposed), found)
    return found


def chunk(s: Pipelines, name: str) -> Values:
    """Return the time of one chunk of each run's ranks, (K, n), without the extra work of the first and last stage."""
    return chunked(s, getattr(s, name), getattr(s.first, name), getattr(s.last, name))


@lru_cache(maxsize=1024)
def moments_of_stages(schedule: str, pp: int, microbatches: int, chunks: int | None) -> list[list[tuple[float, ...]]]:
    """Return the distinct numbers of microbatches that the stages of each rank hold at once, until the backward's end.

    `memory.in_flight_formulas` has closed forms; here the schedule's own order is counted.
    """
    found = find_schedule(schedule)
    order = order_of_computation(found, found.shape(pp, microbatches, chunks), Mesh(pp=pp))
    alone = [Costs(activation=tuple(one)) for one in np.eye(len(order.stage_to_pp)).tolist()]
    each = [simulated_activation_memory.activation_changes(order, costs) for costs in alone]
    moments = []
    for rank in range(pp):
        rows, own = order.columns.rows_of(rank), [s for s, place in enumerate(order.stage_to_pp) if place == rank]
        net, most = (np.array([getattr(each[s], name)[rows] for s in own]) for name in ("net", "most"))
        held = np.unique((np.cumsum(net, axis=1) - net + most) / order.schedule.parts, axis=1).T
        moments.append([tuple(one) for one in held.tolist()])
    return moments
