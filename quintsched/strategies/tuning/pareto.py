"""Pareto front of time and memory: points that are faster than all others with no more memory.

memory │ ·  ·                 ● on the front: no other point
       │ ●     ·              is as fast and as small
       │    ●      ·
       │        ●     ●
       └───────────────▶ time
"""

from __future__ import annotations

import numpy as np

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.tuning.evaluator import Floats
from quintsched.strategies.tuning.strategy_space import Mask


def pareto(time: Floats, memory: Floats, *ties: Ints) -> Ints:
    """Return the indices of the front, by ascending time; of equal points the one whose `ties` are smallest."""
    order = np.lexsort((*reversed(ties), memory, time))
    least = np.minimum.accumulate(memory[order])
    new = np.concatenate([[True], memory[order][1:] < least[:-1]]) if len(order) else np.zeros(0, bool)
    return np.asarray(order[new])


def dominated(time: Floats, memory: Floats, front_time: Floats, front_memory: Floats) -> Mask:
    """Return for each point whether one on the front is faster and no larger; the front is sorted by time."""
    if not len(front_time):
        return np.zeros(len(time), bool)
    before = np.searchsorted(front_time, time, side="left")
    least = np.concatenate([[np.inf], front_memory])[before]
    return least <= memory
