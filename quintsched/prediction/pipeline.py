"""How long a step's computation takes under a schedule, and how many activations it holds: many strategies at once.

    makespan          in closed form where there is one (`closed_forms`), elsewhere by simulation (`levels`)
    lower_bound       never more than that, for searches: the busiest rank's work, before it the way down to that rank,
                      after it the way up
    in_flight         microbatches of each stage whose activations stand where its rank holds most

Times are in seconds, of one microbatch on one of the pp x chunks stages; those of the first and the last stage may be
larger by what is said of them. All arguments but the schedule's name are numbers or arrays that broadcast together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.errors import UsageError
from quintsched.ir.columns import Ints
from quintsched.ir.instructions import ENDS_BACKWARD, Fwd
from quintsched.ir.mesh import Mesh
from quintsched.prediction.closed_forms import CLOSED_FORMS, Passes, Pipelines, Values
from quintsched.prediction.levels import KINDS, levels_of
from quintsched.schedules import find_schedule
from quintsched.schedules.kit.order import order_of_computation

Numbers: TypeAlias = float | npt.ArrayLike

ROUNDS = 3
"""A simulation runs so many times a pipeline's depth in microbatches; more of them repeat what it then has found."""
FEWEST = 8
"""Of how many microbatches a repetition consists at least."""


def pipelines(
    *,
    pp: Numbers,
    microbatches: Numbers,
    chunks: Numbers = 1,
    forward: Numbers,
    backward_input: Numbers,
    backward_weight: Numbers,
    recompute: Numbers = 0.0,
    message: Numbers = 0.0,
    first_forward: Numbers = 0.0,
    first_backward_input: Numbers = 0.0,
    first_backward_weight: Numbers = 0.0,
    last_forward: Numbers = 0.0,
    last_backward_input: Numbers = 0.0,
    last_backward_weight: Numbers = 0.0,
) -> Pipelines:
    """Return pipelines with these times, (n,) each.

    Args:
        pp: pipeline ranks.
        microbatches: of a replica.
        chunks: stages of a rank.
        forward: of a stage between the first and the last, communication inside it included.
        backward_input: the half of a backward that makes the input's gradient, likewise.
        backward_weight: the half that makes the weights' gradient.
        recompute: a forward run again before the backward; it does not wait for the gradient.
        message: the time of a message between two stages, either way.
        first_forward: what the first stage (the embedding) takes besides; and so on.
        last_forward: what the last stage (the head, the loss) takes besides; and so on.
    """
    given = [pp, microbatches, chunks, forward, backward_input, backward_weight, recompute, message]
    given += [first_forward, first_backward_input, first_backward_weight]
    given += [last_forward, last_backward_input, last_backward_weight]
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, np.float64)) for one in given))
    return Pipelines(*columns[:8], Passes(*columns[8:11]), Passes(*columns[11:]))


def has_closed_form(schedule: str) -> bool:
    """Whether `makespan` finds this schedule's by a formula."""
    return find_schedule(schedule).name in CLOSED_FORMS


def makespan(schedule: str, **times: Numbers) -> Values:
    """Return when the last computation ends, (n,), in seconds; the arguments are those of `pipelines`.

    Raises `UsageError` for a schedule that there is not, or that does not take these sizes.
    """
    found = pipelines(**times)
    formula = CLOSED_FORMS.get(find_schedule(schedule).name)
    return formula(found) if formula else _simulated(schedule, found)


def simulated_makespan(schedule: str, **times: Numbers) -> Values:
    """Return the same as `makespan`, by simulation under any schedule."""
    return _simulated(schedule, pipelines(**times))


def _simulated(schedule: str, s: Pipelines) -> Values:
    """Simulate all pipelines of one shape at once."""
    found = np.zeros(len(s.p))
    recomputes = s.r > 0
    shapes, which = np.unique(np.stack([s.p, s.m, s.v, recomputes]), axis=1, return_inverse=True)
    for number, shape in enumerate(shapes.T.astype(int).tolist()):
        members = np.flatnonzero(which.reshape(-1) == number)
        pp, microbatches, chunks, recompute = shape
        stages = len(find_schedule(schedule).placed(pp, chunks))
        again = (bool(recompute),) * stages
        found[members] = repeated_makespan(schedule, pp, microbatches, chunks, again, table(s, members, stages))
    return found


def table(s: Pipelines, members: Ints, stages: int) -> Values:
    """Return durations (kinds, stages, n) of some of the pipelines."""
    f, i, w, r, c = (column[members] for column in (s.f, s.i, s.w, s.r, s.c))
    found = np.stack([np.broadcast_to(one, (stages, len(members))).copy() for one in (f, i, w, i + w, r, c)])
    for stage, more in ((0, s.first), (-1, s.last)):
        for kind, one in enumerate((more.f, more.i, more.w, more.b)):
            found[kind, stage] += one[members]
    return found


def repeated_makespan(
    schedule: str, pp: int, microbatches: int, chunks: int | None, recompute: tuple[bool, ...], durations: Values
) -> Values:
    """Simulate as many microbatches as it takes until what follows repeats, and add what is left of them.

    `durations` are (kinds, stages, n), as `levels.KINDS` orders them; `recompute` says which stages are recomputed.
    """
    step = pp * -(-FEWEST // pp)
    short = ROUNDS * step + microbatches % step
    if microbatches <= short + step:
        return levels_of(schedule, pp, microbatches, chunks, recompute).ends(durations).max(axis=0)
    longer, shorter = (
        levels_of(schedule, pp, some, chunks, recompute).ends(durations).max(axis=0) for some in (short + step, short)
    )
    return longer + (longer - shorter) * ((microbatches - short) // step - 1)


def stage_makespan(
    schedule: str,
    *,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    forward: npt.ArrayLike,
    backward_input: npt.ArrayLike,
    backward_weight: npt.ArrayLike,
    recompute: npt.ArrayLike = 0.0,
    message: npt.ArrayLike = 0.0,
) -> float:
    """Return the makespan of stages that differ; each argument is a number or has one per stage.

    `message` is that of each stage's input, and of the gradient of that.
    """
    stages = len(find_schedule(schedule).placed(pp, chunks))
    given = np.zeros((len(KINDS), stages, 1))
    columns = (forward, backward_input, backward_weight, 0.0, recompute, message)
    for kind, one in enumerate(columns):
        given[kind, :, 0] = np.broadcast_to(np.asarray(one, np.float64), stages)
    given[3] = given[1] + given[2]
    again = tuple(bool(one) for one in given[4, :, 0] > 0)
    return float(repeated_makespan(schedule, pp, microbatches, chunks, again if any(again) else (), given)[0])


UP_AGAIN = frozenset({"gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "bfs"})
"""Schedules under which each rank ends with a whole backward of its first stage, which goes on to the ranks above."""
V_SHAPED = frozenset({"zbv", "dualpipe-v", "v-half", "v-min"})
"""Those under which the first rank has the first and the last stage."""


def lower_bound(schedule: str, **times: Numbers) -> Values:
    """Return what no step takes less than, (n,), in seconds; the arguments are those of `pipelines`."""
    s, name = pipelines(**times), find_schedule(schedule).name
    x, y, alone = s.first, s.last, s.p == 1
    bent = name in V_SHAPED
    up = (s.i if name not in UP_AGAIN else s.b) + s.c
    ends = 1.0 if name in UP_AGAIN else 0.0

    def busy(rank: Values, more: Values | float) -> Values:
        way = np.where(rank > 0, rank * (s.f + s.c) + x.f + ends * (rank * up + x.b), 0.0)
        return way + s.m * (s.v * s.stage + more)

    stages = s.p * s.v
    through = stages * (s.f + s.i) + s.r + 2 * s.c * (s.p - 1) + x.f + x.i + y.f + y.i
    ranks = [
        busy(np.zeros_like(s.p), x.total + np.where(alone | bent, y.total, 0.0)),
        np.where(alone, 0.0, busy(s.p - 1, 0.0 if bent else y.total)),
        np.where(s.p > 2, busy(s.p - 2, 0.0), 0.0),
        through,
    ]
    return np.maximum.reduce(ranks)


def in_flight(schedule: str, pp: int, microbatches: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return how many microbatches of each stage stand where its rank holds most of equal stages, a number per stage.

    Held from the forward to the end of the backward, as `simulation.activation_memory` counts.
    """
    name = find_schedule(schedule).name
    return _in_flight(name, pp, _enough(name, pp, microbatches), chunks)


def peak_activations(
    schedule: str, pp: int, microbatches: int, chunks: int | None, activation: npt.ArrayLike = 1.0
) -> tuple[float, ...]:
    """Return the most that each rank holds; a microbatch holds `activation` on a stage (a number, or one per stage)."""
    name = find_schedule(schedule).name
    counts = _counts(name, pp, _enough(name, pp, microbatches), chunks)
    stages = sum(one.shape[1] for one, _ in counts)
    sizes = np.broadcast_to(np.asarray(activation, np.float64), stages)
    return tuple(float((one @ sizes[list(held)]).max()) for one, held in counts)


HOLD_ALL = frozenset({"gpipe", "bfs"})
"""Schedules under which the activations of all microbatches stand."""


def _enough(schedule: str, pp: int, microbatches: int) -> int:
    """After how many microbatches no rank holds more than before."""
    return microbatches if schedule in HOLD_ALL else min(microbatches, 4 * pp + microbatches % (2 * pp))


@lru_cache(maxsize=1024)
def _in_flight(schedule: str, pp: int, microbatches: int, chunks: int | None) -> tuple[int, ...]:
    counts = _counts(schedule, pp, microbatches, chunks)
    found = [0] * sum(one.shape[1] for one, _ in counts)
    for one, held in counts:
        fullest = one[one.sum(axis=1).argmax()]
        for stage, number in zip(held, fullest.tolist(), strict=True):
            found[stage] = number
    return tuple(found)


@lru_cache(maxsize=256)
def _counts(schedule: str, pp: int, microbatches: int, chunks: int | None) -> tuple[tuple[Ints, tuple[int, ...]], ...]:
    """Return for each rank (how many microbatches of its stages stand after each computation, those stages)."""
    found = find_schedule(schedule)
    plan = order_of_computation(found, found.shape(pp, microbatches, chunks), Mesh(pp=pp))
    columns, counts = plan.columns, []
    change = columns.are(Fwd).astype(np.int64) - columns.are(*ENDS_BACKWARD)
    for rank in range(pp):
        rows, held = columns.rows_of(rank), plan.layout.stages_of(rank)
        mine = columns.stage[rows.start : rows.stop, None] == np.array(held)
        standing = np.cumsum(mine * change[rows.start : rows.stop, None], axis=0)
        counts.append((np.unique(standing, axis=0), tuple(held)))
    return tuple(counts)


def require_pipeline(schedule: str, pp: int, microbatches: int, chunks: int | None) -> None:
    """Raise `UsageError` where a schedule does not take these sizes."""
    found = find_schedule(schedule)
    if found.mode != "train":
        raise UsageError(f"{schedule}: it runs forward only; choose a schedule that trains")
    found.shape(pp, microbatches, chunks)
