"""Closed forms of pipelines against simulations of them: many shapes, many costs of each at once."""

import numpy as np
import pytest

import quintsched as qs
from quintsched.schedules import all_schedules, find_schedule
from quintsched.simulation.costs import Costs
from quintsched.strategies.prediction.pipeline.closed_forms import CLOSED_FORMS
from quintsched.strategies.prediction.pipeline.levels import TIMED_CLASSES
from quintsched.strategies.prediction.pipeline.makespan import (
    bound_of,
    has_closed_form,
    lower_bound,
    makespan,
    of_pipelines,
    peak_activations,
    pipelines,
    rank_pipelines,
    repetition,
    simulated,
    stage_durations,
    staged,
)

TOLERANCE = 0.01
COSTS = 30
"""Of each shape."""
TRAINING = [
    one.name
    for one in all_schedules()
    if one.built_in and one.mode == "train" and one.max_slices == 1 and one.name != "zb-auto"
]
BOUNDED = [name for name in TRAINING if not find_schedule(name).bidirectional]


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


def costs_of(rng, *, messages=0.0, ends=1.0):
    """Return costs of stages, in forwards: embedding and head take more, messages up to so much."""

    def some(most):
        return np.where(rng.random(COSTS) < 0.6, rng.uniform(0, most, COSTS), 0.0)

    return {
        "forward": np.ones(COSTS),
        "backward_input": rng.uniform(0.5, 1.3, COSTS),
        "backward_weight": rng.uniform(0.3, 1.3, COSTS),
        "message": some(messages),
        **{f"first_{name}": some(0.4 * ends) for name in ("forward", "backward_input", "backward_weight")},
        **{f"last_{name}": some(1.2 * ends) for name in ("forward", "backward_input", "backward_weight")},
    }


def compare(name, rng, most_ranks=12, **costs):
    pp, microbatches, chunks = shape_of(name, rng, most_ranks)
    if not has_closed_form(name, microbatches, pp):
        return
    times = {"pp": pp, "microbatches": microbatches, "chunks": chunks, **costs_of(rng, **costs)}
    wanted = simulated(name, pipelines(name, **times))
    np.testing.assert_allclose(makespan(name, **times), wanted, rtol=TOLERANCE, err_msg=f"{name} {times}")
    assert (lower_bound(name, **times) <= wanted * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("seed", range(12))
def test_closed_forms_are_what_a_simulation_finds(name, seed):
    compare(name, np.random.default_rng(seed))


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("seed", range(12))
def test_closed_forms_with_messages_are_what_a_simulation_finds(name, seed):
    compare(name, np.random.default_rng(seed), messages=0.3, ends=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms_of_many_pipelines_are_what_a_simulation_finds(name):
    rng = np.random.default_rng(1000)
    for _ in range(300):
        compare(name, rng, most_ranks=24)
        compare(name, rng, most_ranks=24, messages=0.3, ends=0.1)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_without_ends_closed_forms_are_exact(name):
    rng = np.random.default_rng(5)
    for _ in range(10):
        pp, microbatches, chunks = shape_of(name, rng)
        times = {"pp": pp, "microbatches": microbatches, "chunks": chunks, **costs_of(rng, messages=0.2, ends=0.0)}
        times["recompute"] = rng.uniform(0.3, 1.0, COSTS)
        if microbatches >= pp:
            wanted = simulated(name, pipelines(name, **times))
            np.testing.assert_allclose(makespan(name, **times), wanted, rtol=0.005 if name == "zb-h1" else 1e-9)


def uneven(name, rng):
    """Return pipelines whose first ranks have one layer more, and the same with a run for each rank."""
    pp = int(rng.integers(3, 13))
    microbatches = int(rng.integers(pp, 5 * pp))
    large, layers = int(rng.integers(1, pp)), int(rng.integers(1, 8))
    sizes = (layers + (np.arange(pp) < large))[:, None] / layers
    costs = costs_of(rng, ends=0.3)
    each = {}
    for part in ("forward", "backward_input", "backward_weight"):
        each[part] = sizes * costs[part]
        each[part][0] += costs[f"first_{part}"]
        each[part][-1] += costs[f"last_{part}"]
    ends = {
        end: tuple(costs[f"{end}_{part}"] for part in ("forward", "backward_input", "backward_weight"))
        for end in ("first", "last")
    }
    found = rank_pipelines(name, ranks=np.ones((pp, COSTS)), microbatches=np.full(COSTS, microbatches), **each, **ends)
    return found, staged(name, pp, microbatches, 1, stage_durations(*each.values()))[0]


@pytest.mark.parametrize("name", [name for name in CLOSED_FORMS if find_schedule(name).max_chunks == 1])
@pytest.mark.parametrize("seed", range(10))
def test_closed_forms_of_uneven_stages_are_what_a_simulation_finds(name, seed):
    found, wanted = uneven(name, np.random.default_rng(seed))
    np.testing.assert_allclose(of_pipelines(name, found), wanted, rtol=TOLERANCE)
    assert (bound_of(name, found) <= wanted * (1 + 1e-9)).all()


def random_durations(stages, rng, *, recompute):
    parts = rng.uniform(0.2, 1.5, (4, stages, 1))
    return stage_durations(*parts[:3], parts[3] if recompute else 0.0, float(rng.uniform(0, 0.5)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("recompute", [False, True])
def test_levels_are_timed_as_the_simulator_times_plans(name, recompute):
    rng = np.random.default_rng(3)
    for _ in range(3):
        pp, microbatches, chunks = shape_of(name, rng, 5)
        plan = qs.compile(
            name, mesh=qs.Mesh(pp=pp, dp=2), microbatches=microbatches, chunks=chunks, recompute=int(recompute)
        )
        stages = len(plan.stage_to_pp)
        durations = random_durations(stages, rng, recompute=recompute)
        reduction = np.zeros((stages, 1)) if find_schedule(name).bidirectional else rng.uniform(0, 3, (stages, 1))
        rows = {kind.__name__: durations[number, :, 0].tolist() for number, kind in enumerate(TIMED_CLASSES)}
        wanted = plan.simulate(
            Costs(
                forward=rows["Fwd"],
                backward_input=rows["BwdInput"],
                backward_weight=rows["BwdWeight"],
                recompute=rows["Recompute"],
                p2p=rows["Message"][0],
                reduce_scatter=reduction[:, 0].tolist(),
            )
        )
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
    durations = random_durations(stages, rng, recompute=False)
    plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    each = dict(zip(("forward", "backward_input", "backward_weight"), durations[:3, :, 0].tolist(), strict=True))
    wanted = plan.simulate(Costs(**each, p2p=float(durations[5, 0, 0]))).makespan
    assert staged(name, pp, microbatches, chunks, durations)[0][0] == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("name", BOUNDED)
def test_no_step_takes_less_than_its_bound(name):
    rng = np.random.default_rng(13)
    for _ in range(4):
        pp, microbatches, chunks = shape_of(name, rng, 6)
        times = {"pp": pp, "microbatches": microbatches, "chunks": chunks, **costs_of(rng, messages=0.5)}
        wanted = simulated(name, pipelines(name, **times))
        assert (lower_bound(name, **times) <= wanted * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", TRAINING)
def test_peaks_are_those_of_the_plan(name):
    rng = np.random.default_rng(21)
    pp, microbatches, chunks = shape_of(name, rng, 5)
    plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    wanted = [peak * plan.schedule.parts for peak in plan.simulate().peak_activations]
    assert list(peak_activations(name, pp, microbatches, chunks)) == pytest.approx(wanted)
