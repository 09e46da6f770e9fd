"""Times, bubbles and memory of small plans, each worked out by hand."""

import json
from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.plan import Plan


def test_a_plan_that_cannot_finish_is_not_timed(careless):
    plan = careless(qs.compile("1f1b", mesh="pp=2", microbatches=4))
    assert plan.simulate().makespan == 15, "free under the channel profile, so it can be timed"
    programs = (plan.programs[0][::-1], plan.programs[1])
    with pytest.raises(qs.UnsoundError, match="not sound"):
        replace(plan, programs=programs).simulate()


def test_summary_is_plain_json(plan: Plan):
    summary = json.loads(json.dumps(plan.simulate().summary(), allow_nan=False))
    assert summary["makespan"] == 15
    assert summary["bubble"] == 1 - 12 / 15
    assert summary["mesh"] == {"dp": 2, "pp": 2, "tp": 2}
    assert summary["critical_path"][0] == {"rank": 0, "index": 0, "instruction": "Fwd(stage=0, microbatch=0)"}


def test_the_end_of_a_step_takes_time():
    """The norm waits for all ranks and takes as long as the one with the most to do; each steps on its own."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    simulation = plan.simulate(qs.Costs(clip=(0.5, 2.0), optimizer=(3.0, 1.0)))
    last = [[(s.start, s.end) for s in row[-2:]] for row in simulation.timeline]
    assert last == [[(9, 11), (11, 14)], [(9, 11), (11, 12)]]
    assert simulation.makespan == 14
    assert simulation.busy == (6.0, 6.0)
    assert simulation.bubble == 1 - 12 / 28
    assert simulation.spans == plan.simulate().spans, "a span ends with the last weight gradient"


@pytest.mark.parametrize(("name", "chunks", "slices"), [("interleaved-1f1b", 3, 1), ("seq-1f1b", 1, 3)])
def test_what_is_done_once_is_for_a_whole_rank(name, chunks, slices):
    plan = qs.compile(name, mesh="pp=2", microbatches=2, chunks=chunks, slices=slices)
    idle = plan.simulate().makespan
    assert plan.simulate(qs.Costs(clip=5.0, optimizer=7.0)).makespan == pytest.approx(idle + 12, rel=1e-15)
    stages = len(plan.stage_to_pp)
    listed = plan.simulate(qs.Costs(clip=(1.0,) * stages, optimizer=(2.0,) * stages))
    assert listed.makespan == pytest.approx(idle + 3 * chunks, rel=1e-15)


def test_whole_numbers_stay_exact():
    plan = qs.compile("seq-1f1b", mesh="pp=1", microbatches=1, slices=3, recompute=1)
    costs = qs.Costs(forward=1, recompute=1, backward_input=1, backward_weight=1, clip=1, optimizer=1, activation=1)
    assert plan.simulate(costs).makespan == 6
    assert plan.simulate(costs.model_copy(update={"keys": 1.0})).peak_activations == (1 + 1 / 3,)


def test_a_simulation_knows_its_costs(plan: Plan):
    costs = qs.Costs(unit="ms", optimizer=2.0)
    assert plan.simulate(costs).costs == costs
    assert plan.simulate(costs).unit == "ms"
    assert plan.simulate().costs == qs.Costs()
    for name in ("optimizer", "clip", "keys", "recompute", "activation_checkpointed"):
        with pytest.raises(qs.InputError, match=f"/{name} has 3 values, but the plan has 2 stages"):
            plan.simulate(qs.Costs(**{name: (1.0, 2.0, 3.0)}))
