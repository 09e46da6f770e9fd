"""No strategy of a box is below its bounds."""

import numpy as np
import pytest

from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.strategy_bounds import frame_bounds, mesh_bounds
from quintsched.strategies.tuning.strategy_space import PER_STAGE, make_space

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
    whole = columns["recompute"] != PER_STAGE
    assert np.all(frames.time_s[place[:, 0]] <= found.step_s)
    assert np.all(frames.memory_bytes[place[whole, 0]] <= found.memory_bytes[whole])
    _tuples_hold(seed, space, evaluator, frames, columns, place)
    meshes = mesh_bounds(space, frames)
    mesh_of = np.repeat(np.arange(len(space.starts) - 1), np.diff(space.starts))
    assert np.all(meshes.time_s[mesh_of] <= frames.time_s)
    assert np.all(meshes.memory_bytes[mesh_of] <= frames.memory_bytes)
    return space.num_frames


def _tuples_hold(seed, space, evaluator, frames, columns, place):
    draw = np.random.default_rng(seed)
    for pp in np.unique(columns["pp"]):
        by_stage = (columns["recompute"] == PER_STAGE) & space.recomputes_by_stage(place[:, 0])
        rows = np.flatnonzero(by_stage & (columns["pp"] == pp))[:300]
        if len(rows):
            layers = space.stage_layers(place[rows, 0])
            numbers = draw.integers(0, layers[:, None] + 1, (len(rows), pp))
            found = evaluator.evaluate({name: values[rows] for name, values in columns.items()}, numbers)
            bounds = frames.time_s[place[rows, 0]]
            assert np.all(bounds[found.exact] <= found.step_s[found.exact])
            assert np.all(frames.memory_bytes[place[rows, 0]] <= found.memory_bytes)
            some = np.flatnonzero(~found.exact)[:20]
            if len(some):
                strategies = [space.strategy(space.rows(place[rows[[row]]]), 0, tuple(numbers[row])) for row in some]
                assert np.all(bounds[some] <= evaluator.simulate(strategies))


def test_bounds_hold_for_every_strategy_of_hundreds_of_boxes():
    assert sum(holds(seed) for seed in range(6)) > 150


@pytest.mark.slow
def test_bounds_hold_for_every_strategy_of_tens_of_thousands_of_boxes():
    assert sum(holds(seed) for seed in range(6, 1000)) > 20_000
