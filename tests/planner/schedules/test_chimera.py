"""Chimera and Hanayo: their closed forms in every shape and under all costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs


def simulated(pp, rounds, costs=(1, 1, 1)):
    """Return the simulation, and its idle time beyond the work of a rank."""
    forward, inputs, weights = costs
    plan = qs.compile("chimera", mesh=f"pp={pp}", microbatches=pp * rounds)
    found = plan.simulate(qs.Costs(forward=forward, backward_input=inputs, backward_weight=weights))
    return found, found.makespan - pp * rounds * sum(costs)


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_time_and_memory_in_every_shape(pp, rounds):
    found, idle = simulated(pp, rounds)
    assert idle == (pp - 2) * (2 + (rounds - 1))
    assert found.span == found.makespan
    assert found.busy == (3.0 * pp * rounds,) * pp
    assert found.peak_activations == tuple(float(pp // 2 + 1 + min(rank, pp - 1 - rank)) for rank in range(pp))
    assert idle <= (pp - 1) * 3 or rounds > 1  # 1F1B


@settings(max_examples=60)
@given(pp=st.sampled_from([2, 4, 6]), rounds=st.integers(1, 3), costs=st.tuples(*[st.integers(0, 20)] * 3))
def test_time_under_all_costs(pp, rounds, costs):
    forward, backward = costs[0], costs[1] + costs[2]
    _, idle = simulated(pp, rounds, costs)
    assert idle == pytest.approx((pp - 2) * (max(forward, backward) + (rounds - 1) * abs(forward - backward)))


@settings(max_examples=60)
@given(
    pp=st.integers(1, 6), rounds=st.integers(1, 3), waves=st.integers(1, 3), costs=st.tuples(*[st.integers(0, 20)] * 3)
)
def test_time_and_memory_of_hanayo(pp, rounds, waves, costs):
    forward, backward = costs[0], costs[1] + costs[2]
    plan = qs.compile("hanayo", mesh=f"pp={pp}", microbatches=pp * rounds, chunks=2 * waves)
    found = plan.simulate(qs.Costs(forward=forward, backward_input=costs[1], backward_weight=costs[2]))
    longer = max(forward, backward) + (rounds - 1) * abs(forward - backward)
    assert found.makespan - pp * rounds * sum(costs) == pytest.approx((pp - 1) * longer / waves)
    assert found.peak_activations == pytest.approx(tuple(pp - (pp - 1 - rank) / (2 * waves) for rank in range(pp)))


@pytest.mark.parametrize(("chunks", "microbatches", "why"), [(3, 4, "2 or 4"), (1, 4, "2 to"), (2, 6, "4 or 8")])
def test_other_waves_are_refused(chunks, microbatches, why):
    with pytest.raises(qs.UsageError, match=why):
        qs.compile("hanayo", mesh="pp=4", microbatches=microbatches, chunks=chunks)


@pytest.mark.parametrize(("pp", "microbatches", "why"), [(3, 6, "2 or 4"), (1, 2, "works: 2"), (4, 6, "4 or 8")])
def test_other_shapes_are_refused(pp, microbatches, why):
    with pytest.raises(qs.UsageError, match=why):
        qs.compile("chimera", mesh=f"pp={pp}", microbatches=microbatches)
