"""Closed forms of pipelines against simulations of them: many shapes, many costs of each at once."""

import numpy as np
import pytest

import quintsched as qs
from quintsched.schedules import find_schedule
from quintsched.strategies.prediction.layers_of_ranks import V_SHAPED
from quintsched.strategies.prediction.pipeline.closed_forms import CLOSED_FORMS
from quintsched.strategies.prediction.pipeline.event_graph_levels import TIMED_CLASSES
from quintsched.strategies.prediction.pipeline.runs_of_equal_ranks import Passes, Pipelines
from quintsched.strategies.prediction.pipeline.simulated_makespans import bound_of, has_closed_form, repetition, staged

TOLERANCE = 0.01
COSTS = 30
"""Of each shape."""
TRAINING = [
    one.name
    for one in qs.all_schedules()
    if one.built_in and one.mode == "train" and one.max_slices == 1 and not one.searches
]


def shape_of(name, rng, most_ranks=12):
    """Return (pp, microbatches, chunks) that a schedule takes."""
    schedule = find_schedule(name)
    pp, chunks = int(rng.integers(1, most_ranks + 1)), int(rng.integers(schedule.min_chunks, schedule.min_chunks + 3))
    microbatches = int(rng.integers(1, 5 * pp + 4))
    if name.startswith("interleaved") or name == "hanayo":
        microbatches = pp * int(rng.integers(1, 7))
    if name == "hanayo":
        chunks = 2 * (chunks // 2)
    if schedule.bidirectional:
        pp = 2 * (pp // 2 + 1)
        microbatches = 2 * pp + 2 * int(rng.integers(0, 6)) * (pp // 2 if name == "chimera" else 1)
    return pp, microbatches, min(chunks, schedule.max_chunks)


def pipelines(name, rng, pp, microbatches, chunks, *, ends=1.0, large=0, layers=1):
    """Return pipelines with costs in forwards, and their makespan by simulation.

    Embedding and head take more; the first `large` ranks have a layer more than `layers`. Each rank is a run.
    """

    def some(most):
        return np.where(rng.random(COSTS) < 0.6, rng.uniform(0, most, COSTS), 0.0)

    placed = np.array(find_schedule(name).placed(pp, chunks))
    sizes = (layers + (placed < large))[:, None] / layers
    ranges = ((1.0, 1.0), (0.5, 1.3), (0.3, 1.3))
    stages = np.stack([sizes * rng.uniform(*one, COSTS) for one in ranges])
    first, last = ([some(most * ends) for _ in stages] for most in (0.4, 1.2))
    stages[:, 0] += first
    stages[:, -1] += last
    of_ranks = np.zeros((len(stages), pp, COSTS))
    np.add.at(of_ranks, (slice(None), placed), stages)
    sizes = {"p": pp, "m": microbatches, "v": chunks}
    sizes = {one: np.full(COSTS, float(size)) for one, size in sizes.items()}
    ends = {"first": Passes(*first), "last": Passes(*last), "bent": name in V_SHAPED}
    found = Pipelines(*of_ranks, ranks=np.ones((pp, COSTS)), **sizes, **ends)
    return found, staged(name, pp, microbatches, chunks, durations_of(*stages))[0]


def durations_of(forward, *halves):
    """Return the durations of stages, (kinds, stages, n)."""
    return np.stack([forward, *halves, sum(halves)])


def compare(name, rng, most_ranks=12, tolerance=TOLERANCE, **costs):
    shape = shape_of(name, rng, most_ranks)
    if has_closed_form(name, shape[1], shape[0]):
        found, wanted = pipelines(name, rng, *shape, **costs)
        np.testing.assert_allclose(CLOSED_FORMS[name](found), wanted, rtol=tolerance, err_msg=f"{name} {shape}")
        assert (bound_of(name, found) <= wanted * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("seed", range(12))
def test_closed_forms_are_what_a_simulation_finds(name, seed):
    compare(name, np.random.default_rng(seed))


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_without_ends_closed_forms_are_exact(name):
    rng = np.random.default_rng(5)
    for _ in range(10):
        compare(name, rng, tolerance=1e-9, ends=0.0)


@pytest.mark.parametrize("name", [name for name in CLOSED_FORMS if find_schedule(name).max_chunks == 1])
@pytest.mark.parametrize("seed", range(10))
def test_closed_forms_of_uneven_stages_are_what_a_simulation_finds(name, seed):
    rng = np.random.default_rng(seed)
    pp = int(rng.integers(3, 13))
    shape = pp, int(rng.integers(pp, 5 * pp)), 1
    sizes = {"large": int(rng.integers(1, pp)), "layers": int(rng.integers(1, 8))}
    found, wanted = pipelines(name, rng, *shape, ends=0.3, **sizes)
    np.testing.assert_allclose(CLOSED_FORMS[name](found), wanted, rtol=TOLERANCE)
    assert (bound_of(name, found) <= wanted * (1 + 1e-9)).all()


def random_durations(stages, rng):
    return durations_of(*rng.uniform(0.2, 1.5, (3, stages, 1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TRAINING)
def test_levels_are_timed_as_the_simulator_times_plans(name):
    rng = np.random.default_rng(3)
    for _ in range(3):
        pp, microbatches, chunks = shape_of(name, rng, 5)
        plan = qs.compile(name, mesh=qs.Mesh(pp=pp, dp=2), microbatches=microbatches, chunks=chunks)
        stages = len(plan.stage_to_pp)
        durations = random_durations(stages, rng)
        reduction = np.zeros((stages, 1)) if find_schedule(name).bidirectional else rng.uniform(0, 3, (stages, 1))
        rows = {kind.__name__: durations[number, :, 0].tolist() for number, kind in enumerate(TIMED_CLASSES)}
        times = {"forward": rows["Fwd"], "backward_input": rows["BwdInput"], "backward_weight": rows["BwdWeight"]}
        wanted = plan.simulate(qs.Costs(**times, reduce_scatter=reduction[:, 0].tolist()))
        makespan_s, exposed = staged(name, pp, microbatches, chunks, durations, reduction)
        assert makespan_s[0] + exposed[0] == pytest.approx(wanted.makespan, rel=TOLERANCE)


@pytest.mark.parametrize("name", TRAINING)
def test_what_repeats_need_not_be_simulated(name):
    rng = np.random.default_rng(8)
    pp, _, chunks = shape_of(name, rng, 4)
    microbatches = 20 * pp
    few, more, times = repetition(pp, microbatches)
    assert more + times * (more - few) == microbatches
    assert times > 0
    stages = len(find_schedule(name).placed(pp, chunks))
    durations = random_durations(stages, rng)
    plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    each = dict(zip(("forward", "backward_input", "backward_weight"), durations[:3, :, 0].tolist(), strict=True))
    wanted = plan.simulate(qs.Costs(**each)).makespan
    assert staged(name, pp, microbatches, chunks, durations)[0][0] == pytest.approx(wanted, rel=TOLERANCE)
