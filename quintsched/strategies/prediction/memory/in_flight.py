"""Peak number of microbatches whose activations a pipeline rank holds, in closed form.

    rank 0   F0 F1 F2 F3 B0 F4 B1 …        1f1b, pp = 4: four before the first backward, then one in, one out
    rank 3            F0 B0 F1 B1 …        … and one on the last rank

Counted in microbatches of a whole rank: a chunk's activations count 1/chunks. Equal to `simulation.activation_memory`
on the compiled plan, where an activation is held until its weight gradient is done. Sizes may be arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from quintsched.errors import UsageError
from quintsched.schedules import find_schedule
from quintsched.strategies.prediction.pipeline.makespan import peak_activations

Form = Callable[[Any, Any, Any, Any], Any]
"""(pp, microbatches, chunks, rank) → activations in flight, in chunks."""


def _all(_pp: Any, microbatches: Any, chunks: Any, _rank: Any) -> Any:
    return microbatches * chunks


def _one_f_one_b(pp: Any, microbatches: Any, _chunks: Any, rank: Any) -> Any:
    return np.minimum(pp - rank, microbatches)


def _eager(pp: Any, microbatches: Any, _chunks: Any, rank: Any) -> Any:
    return np.minimum(2 * (pp - rank) - 1, microbatches)


def _interleaved(pp: Any, microbatches: Any, chunks: Any, rank: Any) -> Any:
    return np.minimum(2 * (pp - rank - 1) + (chunks - 1) * pp + 1, microbatches * chunks)


def _as_many_as_ranks(pp: Any, microbatches: Any, chunks: Any, _rank: Any) -> Any:
    return np.minimum(pp, microbatches) * chunks


def _twice_as_many_as_ranks(pp: Any) -> Any:
    return 2 * pp


def _zb_h2(pp: Any, microbatches: Any, _chunks: Any, _rank: Any) -> Any:
    return np.minimum(2 * pp - 1, microbatches)


def _zb_auto(pp: Any, microbatches: Any, _chunks: Any, _rank: Any) -> Any:
    return np.minimum(2 * pp, microbatches)


def _v_half(pp: Any, microbatches: Any, _chunks: Any, _rank: Any) -> Any:
    return 2 * np.minimum((pp + 2) // 2, microbatches)


def _v_min(pp: Any, microbatches: Any, _chunks: Any, _rank: Any) -> Any:
    return 2 * np.minimum((pp + 4) // 3, microbatches)


def _chimera(pp: Any, _microbatches: Any, _chunks: Any, rank: Any) -> Any:
    return pp // 2 + 1 + np.minimum(rank, pp - 1 - rank)


def _hanayo(pp: Any, _microbatches: Any, chunks: Any, rank: Any) -> Any:
    return pp * chunks - (pp - 1 - rank)


def _dualpipe(pp: Any, _microbatches: Any, _chunks: Any, _rank: Any) -> Any:
    return pp + 1


def _dualpipe_v(pp: Any, microbatches: Any, _chunks: Any, rank: Any) -> Any:
    return np.minimum(np.minimum(2 * pp + 1, microbatches + rank + 1), 2 * microbatches)


_FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "gpipe": _all,
        "bfs": _all,
        "1f1b": _one_f_one_b,
        "seq-1f1b": _one_f_one_b,
        "eager-1f1b": _eager,
        "interleaved-1f1b": _interleaved,
        "interleaved-zb": _as_many_as_ranks,
        "zb-h1": _as_many_as_ranks,
        "zbv": _as_many_as_ranks,
        "zb-h2": _zb_h2,
        "zb-auto": _zb_auto,
        "v-half": _v_half,
        "v-min": _v_min,
        "chimera": _chimera,
        "hanayo": _hanayo,
        "dualpipe": _dualpipe,
        "dualpipe-v": _dualpipe_v,
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

DELAYS_HEAD = frozenset({"zb-h1", "zb-h2", "zb-auto", "interleaved-zb"})
"""Schedules whose last stage runs weight halves of backwards, which need the gradient of logits, as late as others."""


def in_flight(schedule: str, *, pp: Any, microbatches: Any, chunks: Any, rank: Any, last: Any = None) -> Any:
    """Return the peak number of microbatches in flight on `rank`, in microbatches of a whole rank.

    With `last`, it is the most of all ranks from `rank` to `last`. A schedule that is not built in has no closed form:
    its order is generated, once per distinct shape. If a rank holds twins of stages, a microbatch passes one of them,
    so half of the rank. Raises `UsageError`.
    """
    found = find_schedule(schedule)
    if found.mode != "train":
        raise UsageError(f"schedule {schedule!r} does not train: it holds no activations")
    last = rank if last is None else last
    if found.name not in _FORMS:
        return _of_orders(found.name, pp, microbatches, chunks, rank, last)
    fullest = _FULLEST_RANK[found.name](pp, rank, last) if found.name in _FULLEST_RANK else rank
    return _FORMS[found.name](pp, microbatches, chunks, fullest) / (2 if found.bidirectional else chunks)


def _of_orders(schedule: str, *shape: Any) -> Any:
    """Return the peaks counted from the schedule's own order."""
    sizes = np.broadcast_arrays(*shape)
    pp, rows = sizes[0], np.stack([size.ravel() for size in sizes], axis=1).tolist()
    held = [max(peak_activations(schedule, p, m, v)[first : last + 1]) / v for p, m, v, first, last in rows]
    return np.reshape(held, pp.shape)


def first_in_flight(schedule: str, *, pp: Any, microbatches: Any, chunks: Any) -> Any:
    """Return the peak number of microbatches of the first stage in flight, whose embedding is kept."""
    found = find_schedule(schedule)
    if found.max_chunks == 1:
        return in_flight(schedule, pp=pp, microbatches=microbatches, chunks=chunks, rank=0) * (1 + found.bidirectional)
    most = _FIRST_STAGE.get(found.name, _twice_as_many_as_ranks)(pp)
    return microbatches if found.name in KEEPS_LOGITS else np.minimum(most, microbatches)


def logits_in_flight(schedule: str, *, pp: Any, microbatches: Any) -> Any:
    """Return the number of microbatches whose logits the last stage keeps at once."""
    name = find_schedule(schedule).name
    if name in DELAYS_HEAD:
        return _FORMS[name](pp, microbatches, 1, pp - 1)
    return microbatches if name in KEEPS_LOGITS else 1 + 0 * microbatches
