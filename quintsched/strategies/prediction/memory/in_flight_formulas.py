"""Peak number of microbatches whose activations a pipeline rank holds, in closed form.

    rank 0   F0 F1 F2 F3 B0 F4 B1 …        1f1b, pp = 4: four before the first backward, then one in, one out
    rank 3            F0 B0 F1 B1 …        … and one on the last rank

Counted in microbatches of a whole rank: a chunk's activations count 1/chunks. Equal to the simulator's peak of the
compiled plan (`simulated_activation_memory`): activations are held until their weight gradient. Sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.schedules import find_schedule
from quintsched.strategies.descriptions.strategy_validity import predictable
from quintsched.strategies.prediction.pipeline.simulated_makespans import moments_of_stages

Form = Callable[[Any, Any, Any, Any], Any]
"""(pp, microbatches, chunks, rank) → activations in flight, in chunks."""
Moments = Sequence[tuple[float, ...]]
"""Numbers of microbatches that the stages of a rank hold, moment by moment."""


_FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "gpipe": lambda _pp, m, v, _rank: m * v,
        "bfs": lambda _pp, m, v, _rank: m * v,
        "1f1b": lambda pp, m, _v, rank: np.minimum(pp - rank, m),
        "seq-1f1b": lambda pp, m, _v, rank: np.minimum(pp - rank, m),
        "eager-1f1b": lambda pp, m, _v, rank: np.minimum(2 * (pp - rank) - 1, m),
        "interleaved-1f1b": lambda pp, m, v, rank: np.minimum(2 * (pp - rank - 1) + (v - 1) * pp + 1, m * v),
        "interleaved-zb": lambda pp, m, v, _rank: np.minimum(pp, m) * v,
        "zb-h1": lambda pp, m, v, _rank: np.minimum(pp, m) * v,
        "zbv": lambda pp, m, v, _rank: np.minimum(pp, m) * v,
        "zb-h2": lambda pp, m, _v, _rank: np.minimum(2 * pp - 1, m),
        "v-half": lambda pp, m, _v, _rank: 2 * np.minimum((pp + 2) // 2, m),
        "v-min": lambda pp, m, _v, _rank: 2 * np.minimum((pp + 4) // 3, m),
        "chimera": lambda pp, _m, _v, rank: pp // 2 + 1 + np.minimum(rank, pp - 1 - rank),
        "hanayo": lambda pp, _m, v, rank: pp * v - (pp - 1 - rank),
        "dualpipe": lambda pp, _m, _v, _rank: pp + 1,
        "dualpipe-v": lambda pp, m, _v, rank: np.minimum(np.minimum(2 * pp + 1, m + rank + 1), 2 * m),
    }
)
_FIRST_STAGE: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"hanayo": lambda pp: pp, "v-half": lambda pp: pp + 1, "v-min": lambda pp: (2 * pp + 5) // 3}
)
"""pp → microbatches of the first stage in flight, for schedules of several chunks where that is not twice pp."""
_FULLEST_RANK: Mapping[str, Callable[[Any, Any, Any], Any]] = MappingProxyType(
    {
        "chimera": lambda pp, first, last: np.clip(pp // 2, first, last),
        "hanayo": lambda _pp, _first, last: last,
        "dualpipe-v": lambda _pp, _first, last: last,
    }
)
"""(pp, first rank, last rank) → that of these ranks with most in flight, for schedules where it is not the first."""
KEEPS_LOGITS = frozenset({"gpipe", "bfs"})
"""Schedules whose last stage runs all forwards before its first backward."""

_OF_STAGES: Mapping[str, Callable[[int, int, int, int], Moments]] = MappingProxyType(
    {
        "interleaved-1f1b": lambda pp, m, v, rank: _interleaved(pp, m, v, rank),
        "zbv": lambda pp, _m, _v, rank: [(2 * pp - rank, rank), (2 * pp - rank - 1, rank + 1)],
        "v-half": lambda pp, m, _v, rank: [
            (pp + 1 - up, 1 + up) for up in (rank // 2, -(-rank // 2)) if pp % 2 == 0 and m >= 2 * pp
        ],
        "chimera": lambda pp, _m, _v, rank: [(min(pp // 2, pp - rank), min(pp // 2, rank + 1))],
        "dualpipe": lambda pp, _m, _v, rank: [(pp - rank, rank + 1)],
        "dualpipe-v": lambda pp, _m, _v, rank: [(2 * pp - rank, rank + 1)],
        "hanayo": lambda pp, _m, v, rank: [(*(pp,) * (v - 1), rank + 1)],
    }
)
"""(pp, microbatches, chunks, rank) → largest numbers of microbatches that the stages of a rank hold at once."""

DELAYS_HEAD = frozenset({"zb-h1", "zb-h2", "interleaved-zb"})
"""Schedules whose last stage runs weight halves of backwards, which need the gradient of logits, as late as others."""


def in_flight(schedule: str, *, pp: Any, microbatches: Any, chunks: Any, rank: Any, last: Any = None) -> Any:
    """Return the peak number of microbatches in flight on `rank`, in microbatches of a whole rank.

    With `last`, it is the most of all ranks from `rank` to `last`. A schedule that is not built in has no closed form:
    its order is generated, once per distinct shape. If a rank holds twins of stages, a microbatch passes one of them,
    so half of the rank. Raises `UsageError`.
    """
    found = predictable(schedule)
    last = rank if last is None else last
    if found.name not in _FORMS:
        return _of_orders(found.name, pp, microbatches, chunks, rank, last)
    fullest = _FULLEST_RANK[found.name](pp, rank, last) if found.name in _FULLEST_RANK else rank
    return _FORMS[found.name](pp, microbatches, chunks, fullest) / (2 if found.bidirectional else chunks)


@lru_cache(maxsize=1024)
def stages_in_flight(schedule: str, pp: int, microbatches: int, chunks: int) -> NDArray[np.float64]:
    """Return the numbers of microbatches in flight by stage of each rank, (pp, moments, stages of a rank).

    Of stages that hold different layers, a rank holds most at one of these moments.
    """
    name = find_schedule(schedule).name
    found: Sequence[Moments] = [()]
    if name in _OF_STAGES:
        found = [_OF_STAGES[name](pp, microbatches, chunks, rank) for rank in range(pp)]
    if not all(found):
        found = moments_of_stages(name, pp, microbatches, chunks)
    most = max(map(len, found))
    table = [[*moments, *[moments[0]] * (most - len(moments))] for moments in found]
    return np.minimum(np.array(table, np.float64), microbatches)


def _interleaved(pp: int, microbatches: int, chunks: int, rank: int) -> Moments:
    """Return the moments after a forward at which it or the next backward begins another chunk."""
    turn, last = pp * chunks, microbatches * chunks
    ahead = int(_FORMS["interleaved-1f1b"](pp, microbatches, chunks, rank))
    done = np.arange(ahead, min(ahead + turn, last) + 1)
    done = done[(done % pp == 0) | ((done - ahead) % pp == 0) | (done == last)][:, None]
    chunk = np.arange(chunks)
    forwards, backwards = (
        passes // turn * pp + np.clip(passes % turn - place * pp, 0, pp)
        for passes, place in ((done, chunk), (done - ahead, chunks - 1 - chunk))
    )
    return [tuple(moment) for moment in (forwards - backwards).tolist()]


def _of_orders(schedule: str, *shape: Any) -> Any:
    """Return the peaks counted from the schedule's own order."""
    sizes = np.broadcast_arrays(*shape)
    pp, rows = sizes[0], np.stack([size.ravel() for size in sizes], axis=1).tolist()
    held = []
    for p, m, v, first, last in rows:
        of_ranks = moments_of_stages(schedule, p, m, v)[first : last + 1]
        held.append(max(sum(moment) for moments in of_ranks for moment in moments) / v)
    return np.reshape(held, pp.shape)


def first_in_flight(schedule: str, *, pp: Any, microbatches: Any, chunks: Any) -> Any:
    """Return the peak number of microbatches of the first stage in flight, whose embedding is kept."""
    found = find_schedule(schedule)
    if found.max_chunks == 1:
        return in_flight(schedule, pp=pp, microbatches=microbatches, chunks=chunks, rank=0) * (1 + found.bidirectional)
    most = _FIRST_STAGE[found.name](pp) if found.name in _FIRST_STAGE else 2 * pp
    return microbatches if found.name in KEEPS_LOGITS else np.minimum(most, microbatches)


def logits_in_flight(schedule: str, *, pp: Any, microbatches: Any) -> Any:
    """Return the number of microbatches whose logits the last stage keeps at once."""
    name = find_schedule(schedule).name
    if name in DELAYS_HEAD:
        return _FORMS[name](pp, microbatches, 1, pp - 1)
    return microbatches if name in KEEPS_LOGITS else 1 + 0 * microbatches
