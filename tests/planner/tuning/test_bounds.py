"""No strategy of a box is below its bounds."""

import random

import numpy as np
import pytest

from quintsched.tuning.bounds import frame_bounds, mesh_bounds
from quintsched.tuning.evaluator import Evaluator
from quintsched.tuning.space import make_space

from .problems import groups, problem


def holds(seed: int) -> int:
    """Check every box of a problem; return how many there are."""
    given = problem(seed)
    if not groups(given):
        return 0
    space = make_space(given.model, given.gpus, given.batch, given.seq, given.choices)
    evaluator = Evaluator(space, given.hardware)
    frames = frame_bounds(space, evaluator, np.arange(space.num_frames))
    columns, place = space.expand(np.arange(space.num_frames))
    found = evaluator.evaluate(columns)
    whole = columns["recompute"] >= -2
    assert np.all(frames.time_s[place[:, 0]] <= found.time_s)
    assert np.all(frames.memory_bytes[place[whole, 0]] <= found.memory_bytes[whole])
    _tuples_hold(seed, space, evaluator, frames, columns, place)
    meshes = mesh_bounds(space, frames)
    mesh_of = np.repeat(np.arange(len(space.starts) - 1), np.diff(space.starts))
    assert np.all(meshes.time_s[mesh_of] <= frames.time_s)
    assert np.all(meshes.memory_bytes[mesh_of] <= frames.memory_bytes)
    return space.num_frames


def _tuples_hold(seed, space, evaluator, frames, columns, place):
    draw = random.Random(seed)
    for row in draw.sample(range(len(place)), min(len(place), 200)):
        if columns["recompute"][row] == -3:
            layers = int(space.stage_layers(place[[row], 0])[0])
            numbers = np.array([[draw.randint(0, layers) for _ in range(columns["pp"][row])]])
            found = evaluator.evaluate({name: values[[row]] for name, values in columns.items()}, numbers)
            assert frames.time_s[place[row, 0]] <= found.time_s[0]
            assert frames.memory_bytes[place[row, 0]] <= found.memory_bytes[0]


def test_bounds_hold_for_every_strategy_of_thousands_of_boxes():
    assert sum(holds(seed) for seed in range(60)) > 2000


@pytest.mark.slow
def test_bounds_hold_for_every_strategy_of_tens_of_thousands_of_boxes():
    assert sum(holds(seed) for seed in range(60, 1000)) > 20_000
