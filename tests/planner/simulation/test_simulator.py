"""Times against a second simulator, and what holds for every simulation."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, Compute, Fwd, Message, Send, short
from quintsched.plan import Plan
from tests.planner.schedules.independent import orders_of, times

CASES = [
    qs.compile(name, mesh=f"pp={pp}", microbatches=m, chunks=v)
    for name, pp, m, v in (
        ("gpipe", 1, 1, 1),
        ("gpipe", 3, 4, 1),
        ("1f1b", 2, 5, 1),
        ("1f1b", 4, 3, 1),
        ("interleaved-1f1b", 2, 4, 2),
        ("interleaved-1f1b", 3, 3, 3),
        ("inference", 3, 4, 2),
    )
]
QUARTERS = st.integers(0, 20).map(lambda n: n / 4)  # exact in floating point


@given(data=st.data(), plan=st.sampled_from(CASES), p2p=QUARTERS)
def test_times_equal_a_second_simulator(data, plan, p2p):
    stages = len(plan.stage_to_pp)
    per_stage = st.lists(QUARTERS, min_size=stages, max_size=stages).map(tuple)
    forward, back_input, back_weight = (data.draw(per_stage) for _ in range(3))
    costs = qs.Costs(forward=forward, backward_input=back_input, backward_weight=back_weight, p2p=p2p)
    simulation = plan.simulate(costs)
    ends = times(
        orders_of(plan),
        plan.stage_to_pp,
        [Fraction(f) for f in forward],
        [Fraction(i) + Fraction(w) for i, w in zip(back_input, back_weight, strict=True)],
        Fraction(p2p),
    )
    for row in simulation.timeline:
        for span in row:
            if isinstance(span.instruction, Fwd | Bwd):
                key = ("F" if isinstance(span.instruction, Fwd) else "B", span.instruction.stage)
                assert span.end == pytest.approx(float(ends[*key, span.instruction.microbatch]), rel=1e-12)
    assert simulation.makespan == pytest.approx(float(max(ends.values())), rel=1e-12)
    assert_consistent(simulation, costs)


def assert_consistent(simulation: qs.Simulation, costs: qs.Costs) -> None:
    plan = simulation.plan
    length = 0.0
    for place in simulation.critical_path:
        span = simulation.timeline[place.rank][place.index]
        length += span.end - span.start
    assert length == pytest.approx(simulation.makespan, rel=1e-12), "the critical path has no gap"
    for rank, row in enumerate(simulation.timeline):
        assert [span.instruction for span in row] == list(plan.programs[rank])
        computed = [span for span in row if isinstance(span.instruction, Compute)]
        assert all(a.end <= b.start for a, b in pairwise(computed))
        assert simulation.busy[rank] == pytest.approx(sum(span.end - span.start for span in computed), rel=1e-12)
        assert simulation.spans[rank] <= simulation.makespan
    assert 0 <= simulation.bubble <= 1
    assert 0 <= simulation.span_bubble <= 1


def test_scalars_are_for_a_whole_rank_and_lists_for_stages():
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2, chunks=2)
    scalar = plan.simulate(qs.Costs(forward=2.0, backward_input=3.0, backward_weight=1.0))
    listed = plan.simulate(
        qs.Costs(forward=(1.0,) * 4, backward_input=(1.5,) * 4, backward_weight=(0.5,) * 4, activation=(0.5,) * 4)
    )
    assert scalar.timeline == listed.timeline
    assert scalar.peak_activations == listed.peak_activations
    assert scalar.busy == (2 * 6.0,) * 2


def test_activation_costs_weigh_stages():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)
    assert plan.simulate(qs.Costs(activation=(10.0, 1.0))).peak_activations == (20.0, 1.0)


def test_messages_overlap_with_computation_and_queue_in_their_channel():
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=3)
    simulation = plan.simulate(qs.Costs(p2p=2.0))
    sends = [s for s in simulation.timeline[0] if isinstance(s.instruction, Send)]
    assert [(s.start, s.end) for s in sends] == [(1, 3), (3, 5), (5, 7)]
    forwards = [s for s in simulation.timeline[0] if isinstance(s.instruction, Fwd)]
    assert [(s.start, s.end) for s in forwards] == [(0, 1), (1, 2), (2, 3)]
    both = {str(s.instruction): (s.start, s.end) for s in simulation.timeline[1] if isinstance(s.instruction, Message)}
    assert both["RecvAct(stage=1, microbatch=2, peer=0)"] == (5, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"forward": NaN}', "NaN is not a JSON number"),
        ('{"forward": 1, "forward": 2}', "duplicate key 'forward'"),
        ('{"forward": -1}', "/forward"),
        ('{"forward": 1e999}', "1e999 is too large"),
        ('{"forwards": 1}', "/forwards: unknown key"),
        ('{"forward": "1"}', "/forward"),
        ('{"forward": true}', "/forward"),
        ('{"p2p": [1]}', "/p2p"),
        ("[]", "object"),
    ],
)
def test_broken_costs_are_one_error_with_the_place(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(qs.InputError) as caught:
        qs.Costs.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_costs_for_another_number_of_stages(plan: Plan):
    with pytest.raises(qs.InputError, match="/forward has 3 values, but the plan has 2 stages"):
        plan.simulate(qs.Costs(forward=(1.0, 2.0, 3.0)))


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


def test_costs_from_python_take_lists_and_whole_numbers():
    assert qs.Costs(forward=[1, 2], p2p=0) == qs.Costs(forward=(1.0, 2.0))


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
    assert_consistent(simulation, simulation.costs)


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


def test_keys_stand_from_the_forward_of_the_first_slice_to_its_backward():
    alone = qs.compile("seq-1f1b", mesh="pp=1", microbatches=1, slices=2)
    assert alone.simulate(qs.Costs(activation=4.0, keys=6.0)).peak_activations == (10.0,)
    plan = qs.compile("seq-1f1b", mesh="pp=1", microbatches=2, slices=2)
    assert [short(i, with_stage=False) for i in plan.programs[0]][:5] == ["F0", "F1", "B1", "F2", "B0"]
    assert plan.simulate(qs.Costs(activation=4.0, keys=6.0)).peak_activations == (6.0 + 2.0 + 6.0 + 2.0,)
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=2)
    assert plan.simulate(qs.Costs(activation=0.0, keys=(1.0, 3.0))).peak_activations == (2.0, 6.0)
    whole = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    assert whole.simulate(qs.Costs(keys=6.0)).peak_activations == whole.simulate().peak_activations


def test_a_simulation_knows_its_costs(plan: Plan):
    costs = qs.Costs(unit="ms", optimizer=2.0)
    assert plan.simulate(costs).costs == costs
    assert plan.simulate(costs).unit == "ms"
    assert plan.simulate().costs == qs.Costs()
    for name in ("optimizer", "clip", "keys", "recompute", "activation_checkpointed"):
        with pytest.raises(qs.InputError, match=f"/{name} has 3 values, but the plan has 2 stages"):
            plan.simulate(qs.Costs(**{name: (1.0, 2.0, 3.0)}))
