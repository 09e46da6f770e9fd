"""ZBV, V-Half and V-Min: soundness at all sizes, the table, and the formulas of time and memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import BwdInput, BwdWeight, Fwd
from quintsched.plan import Plan
from quintsched.schedules import find_schedule
from quintsched.simulation.costs import Costs

NAMES = ("zbv", "v-half", "v-min")


def planned(name: str, P: int, M: int) -> Plan:
    return qs.compile(name, mesh=qs.Mesh(pp=P), microbatches=M)


def memory(name: str, P: int) -> int:
    return {"zbv": P, "v-half": (P + 2) // 2, "v-min": (P + 4) // 3}[name]


def idle(P: int, k: int) -> float:
    """The formula of the family with k chunks' activations, at unit costs."""
    return max(0, 3 * P - 1 - 3 * k + max(3 * P, P - 1 + 2 * (1 + (k + 1) // 2))) / 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", range(1, 10))
def test_sound_within_its_memory_at_every_size(name, pp):
    for microbatches in (*range(1, 2 * pp + 2), 4 * pp + 3):
        plan = planned(name, pp, microbatches)  # compiled, it is proved free of deadlock under `blocking`
        simulation = plan.simulate()
        assert max(simulation.peak_activations) <= min(memory(name, pp), microbatches), plan.title
        assert simulation.busy == (3.0 * microbatches,) * pp


@settings(max_examples=100)
@given(P=st.integers(1, 12), extra=st.integers(0, 12), costs=st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_the_span_of_zbv(P, extra, costs):
    W, F, I = sorted(costs)  # noqa: E741
    M = 2 * P - 1 + extra
    simulation = planned("zbv", P, M).simulate(Costs(forward=F, backward_input=I, backward_weight=W))
    assert simulation.span == M * (F + I + W) + (P - 1) * (I - W)
    assert simulation.peak_activations == (float(P),) * P


@settings(max_examples=100)
@given(name=st.sampled_from(["v-half", "v-min"]), P=st.integers(1, 16), extra=st.integers(0, 8))
def test_time_and_memory_of_v_half_and_v_min(name, P, extra):
    M, k = 2 * P + extra, memory(name, P)
    simulation = planned(name, P, M).simulate()
    assert max(simulation.peak_activations) == k
    assert simulation.span == 3 * M + idle(P, 2 * k)
    assert simulation.makespan == 3 * M + (0.5 if P == 2 else idle(P, 2 * k))


@pytest.mark.parametrize(("pp", "known"), [(4, 5.5), (8, 13.5)])
def test_v_min_is_no_worse_than_the_reference(pp, known):
    assert planned("v-min", pp, 2 * pp).simulate().makespan <= 6 * pp + known


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_come_in_order(name):
    for program in planned(name, 5, 13).programs:
        for kind in (Fwd, BwdInput, BwdWeight):
            for stage in range(10):
                found = [i.microbatch for i in program if type(i) is kind and i.stage == stage]
                assert found == sorted(found)


@pytest.mark.parametrize("name", NAMES)
def test_stages_go_down_the_ranks_and_up_again(name):
    assert find_schedule(name).shape(4, 8, None).stage_to_pp == (0, 1, 2, 3, 3, 2, 1, 0)
