"""What no strategy of a box can fall below, in time and in memory.

    box     time                                                  memory
    frame   its pipeline, with the least recomputation, ahead of  each kind of rank's weights, gradients and optimizer
            what ends a step                                      state cut as finely as may be, with the activations of
                                                                  the recomputation that leaves it least
    mesh    the least of its frames'                              the least of its frames'

Each figure is the prediction's own, for a row in which all terms are least. So bounds follow where the prediction
changes, as long as three things hold of it: more recomputation makes no pipeline faster, and ZeRO none; higher levels
of ZeRO hold no more of weights, gradients and optimizer state; and what a rank holds is least with one of the extreme
numbers of recomputed layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quintsched.tuning.evaluator import Evaluator, Floats
from quintsched.tuning.space import FRAME, FULL, NONE, PER_STAGE, SELECTIVE, Columns, Ints, Space

SLACK = 1e-9
"""By this share a bound is lowered, for what rounding may have added."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower bounds of n boxes."""

    time_s: Floats
    memory_bytes: Floats


def frame_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Bounds:
    """Return what no leaf of each of these frames falls below."""
    time = np.full(len(frames), np.inf)
    memory = np.full(len(frames), np.inf)
    spread = np.array([max(space.choices.sequence_parallel)])
    for dtype in range(len(space.choices.dtype)):
        for sequence_parallel in space.choices.sequence_parallel:
            for code in least_recomputes(space):
                rows = relaxed(space, frames, dtype, 0, int(sequence_parallel), code)
                time = np.minimum(time, evaluator.pipeline_s(rows))
        held = [
            evaluator.resident_bytes(relaxed(space, frames, dtype, max(space.choices.zero), int(spread[0]), code))
            for code in extreme_recomputes(space)
        ]
        memory = np.minimum(memory, np.minimum.reduce(held).max(axis=1))
    return Bounds(time * (1 - SLACK), memory * (1 - SLACK))


def mesh_bounds(space: Space, frames: Bounds) -> Bounds:
    """Return what no frame of each mesh falls below, from the bounds of all frames."""
    starts = space.starts[:-1]
    return Bounds(np.minimum.reduceat(frames.time_s, starts), np.minimum.reduceat(frames.memory_bytes, starts))


def relaxed(space: Space, frames: Ints, dtype: int, zero: int, sequence_parallel: int, recompute: int) -> Columns:
    """Return a row for each frame with these switches."""
    columns: Columns = {name: space.column(name, frames) for name in FRAME}
    switches = {"dtype": dtype, "zero": zero, "sequence_parallel": sequence_parallel, "recompute": recompute}
    for name, value in switches.items():
        columns[name] = np.full(len(frames), value, np.int64)
    columns["sequence_parallel"] = columns["sequence_parallel"] * (columns["tp"] > 1)
    return columns


def least_recomputes(space: Space) -> list[int]:
    """Return the choices of recomputation of which one takes least time."""
    codes, numbers = _codes(space)
    if {NONE, PER_STAGE} & codes:
        return [NONE]
    return [code for code in (SELECTIVE, FULL) if code in codes] + numbers[:1]


def extreme_recomputes(space: Space) -> list[int]:
    """Return the choices of recomputation of which, for any rank, one holds least."""
    codes, numbers = _codes(space)
    if PER_STAGE in codes:
        codes = codes | {NONE, FULL}
    return [code for code in (NONE, SELECTIVE, FULL) if code in codes] + sorted({*numbers[:1], *numbers[-1:]})


def _codes(space: Space) -> tuple[set[int], list[int]]:
    codes = space.recomputes.tolist()
    return set(codes), [code for code in codes if code > 0]
