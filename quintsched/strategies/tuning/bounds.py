"""What no strategy of a box can fall below, in time and in memory.

    box     time                                                  memory
    frame   its pipeline, with the least recomputation, ahead of  each kind of rank's weights, gradients and optimizer
            what ends a step                                      state cut as finely as may be, with the activations of
                                                                  the recomputation that leaves it least
    mesh    the least of its frames'                              the least of its frames'

Each figure is the prediction's own, for a row in which all terms are least. So bounds follow where the prediction
changes, as long as two things hold of it: more recomputation makes no pipeline faster, and ZeRO none; and what a rank
holds is least with one of the extreme numbers of recomputed layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quintsched.strategies.tuning.evaluator import STATE, Evaluator, Floats
from quintsched.strategies.tuning.space import FRAME, FULL, NONE, PER_STAGE, SELECTIVE, Columns, Ints, Space

SLACK = 1e-9
"""By this share a bound is lowered, for what rounding may have added."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower bounds of n boxes."""

    time_s: Floats
    memory_bytes: Floats


def frame_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Bounds:
    """Return what no leaf of each of these frames falls below."""
    return Bounds(time_bounds(space, evaluator, frames), memory_bounds(space, evaluator, frames))


def time_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Floats:
    """Return the seconds that no leaf of each frame falls below."""
    time = np.full(len(frames), np.inf)
    for dtype in range(len(space.choices.dtype)):
        for sequence_parallel in space.choices.sequence_parallel:
            for code in least_recomputes(space):
                rows = relaxed(space, frames, dtype, 0, int(sequence_parallel), code)
                time = np.minimum(time, evaluator.pipeline_s(rows))
    return time * (1 - SLACK)


def memory_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Floats:
    """Return the bytes that the fullest rank of every leaf of each frame holds at least."""
    dtypes = range(len(space.choices.dtype))
    held = [_least_bytes(space, evaluator, frames, dtype) for dtype in dtypes]
    return np.asarray(np.minimum.reduce(held) * (1 - SLACK))


def _least_bytes(space: Space, evaluator: Evaluator, frames: Ints, dtype: int) -> Floats:
    """Return the same for one dtype."""
    spread, zeros, codes = int(max(space.choices.sequence_parallel)), space.choices.zero, extreme_recomputes(space)
    state: list[Floats] = []
    others: list[Floats] = []
    for zero, code in [*((zero, codes[0]) for zero in zeros), *((zeros[0], code) for code in codes[1:])]:
        terms = evaluator.resident_bytes(relaxed(space, frames, dtype, zero, spread, code))
        state.append(sum((terms[name] for name in STATE), np.zeros(1)))
        others.append(sum((held for name, held in terms.items() if name not in STATE), np.zeros(1)))
    return np.asarray((np.minimum.reduce(state) + np.minimum.reduce(others)).max(axis=1))


def mesh_bounds(space: Space, frames: Bounds) -> Bounds:
    """Return what no frame of each mesh falls below, from the bounds of all frames."""
    starts = space.starts[:-1]
    return Bounds(np.minimum.reduceat(frames.time_s, starts), np.minimum.reduceat(frames.memory_bytes, starts))


def relaxed(space: Space, frames: Ints, dtype: int, zero: int, sequence_parallel: int, recompute: int) -> Columns:
    """Return a row for each frame with these switches."""
    columns: Columns = {name: space.column(name, frames) for name in FRAME}
    switches = {"dtype": dtype, "zero": zero, "overlap": 0, "recompute": recompute}
    switches["sequence_parallel"] = sequence_parallel
    for name, value in switches.items():
        columns[name] = np.full(len(frames), value, np.int64)
    columns["sequence_parallel"] *= space.tokens_divide(frames)
    return columns


def least_recomputes(space: Space) -> list[int]:
    """Return the choices of recomputation of which one takes least time."""
    codes, numbers = _codes(space)
    if {NONE, PER_STAGE} & codes:
        return [NONE]
    return [code for code in (SELECTIVE, FULL) if code in codes] + numbers[:1]


def extreme_recomputes(space: Space) -> list[int]:
    """Return the choices of recomputation of which, for any rank, one holds least.

    What a rank holds rises once, for what is recomputed at a time, and then falls or rises evenly with each layer: so
    it is least where nothing is recomputed, where all is, or with one of the extreme numbers.
    """
    codes, numbers = _codes(space)
    if PER_STAGE in codes:
        codes = codes | {NONE, FULL}
    least = [] if NONE in codes else numbers[:1]
    most = [] if FULL in codes else numbers[-1:]
    return [code for code in (NONE, SELECTIVE, FULL) if code in codes] + sorted({*least, *most})


def _codes(space: Space) -> tuple[set[int], list[int]]:
    codes = space.recomputes.tolist()
    return set(codes), [code for code in codes if code > 0]
