"""Lower bounds on time and memory of all strategies in a box.

    box     time                                                  memory
    frame   its pipeline with the least recomputation, without    each kind of rank's weights, gradients and optimizer
            the end of the step                                   state under the finest sharding, with the activations
                                                                  of the recomputation that leaves least
    mesh    the minimum over its frames                           the minimum over its frames

Each bound is the prediction's own result for a row in which all terms are minimal. So bounds follow changes of the
prediction, as long as it has two properties: neither more recomputation nor ZeRO makes a pipeline faster; and a rank's
memory is minimal for one of the extreme numbers of recomputed layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.tuning.evaluator import STATE, Evaluator, Floats
from quintsched.strategies.tuning.strategy_space import FRAME, FULL, NONE, PER_STAGE, SELECTIVE, Columns, Space

BOUND_MARGIN = 1e-9
"""Relative margin by which bounds are lowered, because of rounding."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower bounds of n boxes."""

    time_s: Floats
    memory_bytes: Floats


def frame_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Bounds:
    """Return the lower bounds of each of these frames, over all their leaves."""
    return Bounds(time_bounds(space, evaluator, frames), memory_bounds(space, evaluator, frames))


def time_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Floats:
    """Return a lower bound on the seconds of all leaves of each frame."""
    time = np.full(len(frames), np.inf)
    for dtype in range(len(space.choices.dtype)):
        for sequence_parallel in space.choices.sequence_parallel:
            for code in least_recomputes(space):
                rows = relaxed(space, frames, dtype, 0, int(sequence_parallel), code)
                time = np.minimum(time, evaluator.pipeline_s(rows))
    return time * (1 - BOUND_MARGIN)


def memory_bounds(space: Space, evaluator: Evaluator, frames: Ints) -> Floats:
    """Return a lower bound on the peak bytes of all leaves of each frame."""
    dtypes = range(len(space.choices.dtype))
    held = [_least_bytes(space, evaluator, frames, dtype) for dtype in dtypes]
    return np.asarray(np.minimum.reduce(held) * (1 - BOUND_MARGIN))


def _least_bytes(space: Space, evaluator: Evaluator, frames: Ints, dtype: int) -> Floats:
    """Return the same for one dtype, in bytes."""
    spread, zeros, codes = int(max(space.choices.sequence_parallel)), space.choices.zero, extreme_recomputes(space)
    state: list[Floats] = []
    others: list[Floats] = []
    for zero, code in [*((zero, codes[0]) for zero in zeros), *((zeros[0], code) for code in codes[1:])]:
        terms = evaluator.resident_bytes(relaxed(space, frames, dtype, zero, spread, code))
        state.append(sum((terms[name] for name in STATE), np.zeros(1)))
        others.append(sum((held for name, held in terms.items() if name not in STATE), np.zeros(1)))
    return np.asarray((np.minimum.reduce(state) + np.minimum.reduce(others)).max(axis=1))


def mesh_bounds(space: Space, frames: Bounds) -> Bounds:
    """Return the lower bounds of each mesh, from the bounds of all frames."""
    starts = space.starts[:-1]
    return Bounds(np.minimum.reduceat(frames.time_s, starts), np.minimum.reduceat(frames.memory_bytes, starts))


def relaxed(space: Space, frames: Ints, dtype: int, zero: int, sequence_parallel: int, recompute: int) -> Columns:
    """Return one row per frame with these switches."""
    columns: Columns = {name: space.column(name, frames) for name in FRAME}
    switches = {"dtype": dtype, "zero": zero, "zero_every": 1, "recompute": recompute}
    switches |= {"sequence_parallel": sequence_parallel, "overlap": int(max(space.choices.overlap))}
    for name, value in switches.items():
        columns[name] = np.full(len(frames), value, np.int64)
    columns["sequence_parallel"] *= space.tokens_divide(frames)
    return columns


def least_recomputes(space: Space) -> list[int]:
    """Return the choices of recomputation among which one takes the least time."""
    codes, numbers = _codes(space)
    if {NONE, PER_STAGE} & codes:
        return [NONE]
    modules = [code for code in codes if code == SELECTIVE or code < PER_STAGE]
    return [*modules, *([FULL] if FULL in codes else []), *numbers[:1]]


def extreme_recomputes(space: Space) -> list[int]:
    """Return the choices of recomputation among which, for any rank, one holds the least memory.

    A rank's memory rises once, for the block being recomputed, and then changes linearly with each layer: so it is
    minimal without recomputation, with full recomputation, or for one of the extreme numbers.
    """
    codes, numbers = _codes(space)
    if PER_STAGE in codes:
        codes = codes | {NONE, FULL}
    least = [] if NONE in codes else numbers[:1]
    most = [] if FULL in codes else numbers[-1:]
    modules = sorted(code for code in codes if code < PER_STAGE)
    return [*(code for code in (NONE, SELECTIVE, FULL) if code in codes), *modules, *sorted({*least, *most})]


def _codes(space: Space) -> tuple[set[int], list[int]]:
    codes = space.recomputes.tolist()
    return set(codes), [code for code in codes if code > 0]
