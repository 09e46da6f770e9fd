"""How long a step's computation takes under a schedule, and how many activations it holds: many strategies at once.

    makespan          of pipelines whose stages are alike but for what the first and the last do besides
    rank_makespan     of pipelines of runs of equal ranks, as an uneven number of layers makes them
    stage_makespan    of one pipeline with stages as they come
    lower_bound       never more than these, for searches: the busiest rank's work, before it the way down to that rank,
                      after it the way up
    in_flight         microbatches of each stage whose activations stand where its rank holds most

The first two are closed forms where there is one (`closed_forms`); all else is simulated (`levels`). Times are in
seconds, of one microbatch. Arguments are numbers or arrays that broadcast together; n is the number of pipelines.
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
V_SHAPED = frozenset({"zbv", "dualpipe-v", "v-half", "v-min"})
"""Schedules under which the first rank has the first and the last stage."""
WHOLE_BACKWARDS = frozenset({"gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "bfs"})
"""Those under which each rank ends with a whole backward of its first stage, which goes on to the ranks above."""
HOLD_ALL = frozenset({"gpipe", "bfs"})
"""Those under which the activations of all microbatches stand."""


def pipelines(
    schedule: str,
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
    """Return pipelines of equal stages, (n,) each.

    Args:
        schedule: its name.
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
    first = (first_forward, first_backward_input, first_backward_weight)
    last = (last_forward, last_backward_input, last_backward_weight)
    given = (pp, microbatches, chunks, message, recompute, forward, backward_input, backward_weight, *first, *last)
    p, m, v, c, r, *passes = np.broadcast_arrays(*(np.atleast_1d(np.asarray(one, np.float64)) for one in given))
    ends_above = (p == 1) | (find_schedule(schedule).name in V_SHAPED)
    ranks = np.stack([np.ones_like(p), np.where(ends_above, p - 1, p - 2), np.where(ends_above, 0.0, 1.0)])
    stages, x, y = passes[:3], passes[3:6], passes[6:]
    each = [
        np.stack([v * one + more + np.where(ends_above, most, 0.0), v * one, v * one + most])
        for one, more, most in zip(stages, x, y, strict=True)
    ]
    again = np.stack([v * r] * 3)
    c = np.where(p > 1, c, 0.0)
    return Pipelines(each[0], each[1], each[2], again, ranks, c, p, m, v, Passes(*x), Passes(*y))


def has_closed_form(schedule: str) -> bool:
    """Whether `makespan` finds this schedule's by a formula."""
    return find_schedule(schedule).name in CLOSED_FORMS


def makespan(schedule: str, **times: Numbers) -> Values:
    """Return when the last computation ends, (n,), in seconds; the arguments are those of `pipelines`.

    Raises `UsageError` for a schedule that there is not, or, where it is simulated, that does not take these sizes.
    """
    return of_pipelines(schedule, pipelines(schedule, **times))


def of_pipelines(schedule: str, found: Pipelines) -> Values:
    """Return when the last computation of each pipeline ends, (n,): by the closed form, if there is one."""
    formula = CLOSED_FORMS.get(find_schedule(schedule).name)
    return formula(found) if formula else simulated(schedule, found)


def rank_makespan(
    schedule: str,
    *,
    ranks: npt.ArrayLike,
    microbatches: npt.ArrayLike,
    chunks: Numbers = 1,
    forward: npt.ArrayLike,
    backward_input: npt.ArrayLike,
    backward_weight: npt.ArrayLike,
    recompute: npt.ArrayLike = 0.0,
    message: Numbers = 0.0,
    first: tuple[Numbers, Numbers, Numbers] = (0.0, 0.0, 0.0),
    last: tuple[Numbers, Numbers, Numbers] = (0.0, 0.0, 0.0),
) -> Values:
    """Return the same for pipelines of runs of equal ranks.

    Args:
        schedule: its name.
        ranks: how many each run has, (K, n), in the order of the ranks; a run may be of none.
        microbatches: (n,).
        chunks: stages of a rank.
        forward: what all stages of a rank of each run take, (K, n), embedding and head included; and so on.
        backward_input: likewise.
        backward_weight: likewise.
        recompute: likewise.
        message: the time of a message, either way.
        first: how much of the forward and the backward's halves belongs to the first stage alone, (n,) each.
        last: to the last stage alone, likewise.
    """
    counts = np.asarray(ranks, np.float64)
    p, m = counts.sum(axis=0), np.asarray(microbatches, np.float64)
    f, i, w, r = (
        np.broadcast_to(np.asarray(one, np.float64), counts.shape)
        for one in (forward, backward_input, backward_weight, recompute)
    )
    v, c, *ends = (np.broadcast_to(np.asarray(one, np.float64), p.shape) for one in (chunks, message, *first, *last))
    c = np.where(p > 1, c, 0.0)
    return of_pipelines(schedule, Pipelines(f, i, w, r, counts, c, p, m, v, Passes(*ends[:3]), Passes(*ends[3:])))


def simulated(schedule: str, s: Pipelines) -> Values:
    """Return when the last computation of each pipeline ends, (n,), by simulation: all of one shape at once."""
    found = np.zeros(len(s.p))
    recomputes = (s.r > 0).any(axis=0)
    shapes, which = np.unique(np.stack([s.p, s.m, s.v, recomputes]), axis=1, return_inverse=True)
    for number, (pp, microbatches, chunks, recompute) in enumerate(shapes.T.astype(int).tolist()):
        members = np.flatnonzero(which.reshape(-1) == number)
        placed = find_schedule(schedule).placed(pp, chunks)
        again = (bool(recompute),) * len(placed)
        durations = _stage_durations(s, placed)[:, :, members]
        found[members] = repeated_makespan(schedule, pp, microbatches, chunks, again, durations)
    return found


def _stage_durations(s: Pipelines, placed: tuple[int, ...]) -> Values:
    """Return what each stage takes, (kinds, stages, n), where a rank's stages are alike but for the first and last."""
    ends = {0: s.first, len(placed) - 1: s.last}
    columns: list[Values] = []
    for name in ("f", "i", "w"):
        of_ranks = [s.at(getattr(s, name), np.full_like(s.p, rank)) for rank in placed]
        for stage, more in ends.items():
            of_ranks[stage] = of_ranks[stage] + 0.0
            for other, rank in enumerate(placed):
                if rank == placed[stage]:
                    of_ranks[other] = of_ranks[other] - getattr(more, name)
        stages = [each / s.v for each in of_ranks]
        for stage, more in ends.items():
            stages[stage] = stages[stage] + getattr(more, name)
        columns.append(np.stack(stages))
    again = np.stack([s.at(s.r, np.full_like(s.p, rank)) / s.v for rank in placed])
    f, i, w = columns
    return np.stack([f, i, w, i + w, again, np.broadcast_to(s.c, f.shape)])


def repeated_makespan(
    schedule: str, pp: int, microbatches: int, chunks: int | None, recompute: tuple[bool, ...], durations: Values
) -> Values:
    """Simulate as many microbatches as it takes until what follows repeats, and add what is left of them.

    `durations` are (kinds, stages, n), as `levels.KINDS` orders them; `recompute` says which stages are recomputed.
    """
    step = pp * -(-FEWEST // pp)
    short = ROUNDS * step + microbatches % step
    if microbatches <= short + step:
        return np.asarray(levels_of(schedule, pp, microbatches, chunks, recompute).ends(durations).max(axis=0))
    longer, shorter = (
        levels_of(schedule, pp, some, chunks, recompute).ends(durations).max(axis=0) for some in (short + step, short)
    )
    return np.asarray(longer + (longer - shorter) * ((microbatches - short) // step - 1))


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


def lower_bound(schedule: str, **times: Numbers) -> Values:
    """Return what no step takes less than, (n,), in seconds; the arguments are those of `pipelines`."""
    s, name = pipelines(schedule, **times), find_schedule(schedule).name
    up = (s.b if name in WHOLE_BACKWARDS else np.zeros_like(s.f)) / s.v
    back = 1.0 if name in WHOLE_BACKWARDS else 0.0
    below = s.ranks[0] + s.ranks[1] - 1
    found = np.zeros_like(s.c)
    for run, rank in ((0, np.zeros_like(s.p)), (1, below), (2, s.p - 1)):
        down = np.where(rank > 0, rank * (s.f[1] / s.v + s.c) + s.first.f, 0.0)
        home = np.where(rank > 0, back * (rank * (up[1] + s.c) + s.first.b), 0.0)
        busy = down + s.m * (s.f + s.b + s.r)[run] + home
        found = np.where(s.ranks[run] > 0, np.maximum(found, busy), found)
    through = s.p * (s.f + s.i)[1] + s.r[1] / s.v + 2 * s.c * (s.p - 1)
    ends = s.first.f + s.first.i + s.last.f + s.last.i
    return np.asarray(np.maximum(found, through + ends))


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
