"""ZBV, V-Half, V-Min, DualPipe, DualPipeV, Chimera and Hanayo: soundness at all sizes, time and memory by formula."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs

FUSED = {("dualpipe", 4, 8): 26, ("dualpipe", 8, 16): 54, ("dualpipe-v", 4, 8): 27, ("dualpipe-v", 8, 16): 55}
"""The makespans that the table's note states where a pair is one block."""
SIZES = [*((name, pp) for name in ("zbv", "v-half", "v-min", "dualpipe-v") for pp in range(1, 10))]
SIZES += [("dualpipe", pp) for pp in (2, 4, 6, 8, 10)]


def planned(name: str, P: int, M: int, *, overlap: bool = False, chunks: int | None = None) -> qs.Plan:
    return qs.compile(name, mesh=qs.Mesh(pp=P), microbatches=M, overlap=overlap, chunks=chunks)


def memory(name: str, P: int) -> float:
    known = {"zbv": P, "v-half": (P + 2) // 2, "v-min": (P + 4) // 3, "dualpipe-v": P + 0.5, "dualpipe": P + 1}
    return float(known[name])


def idle(P: int, k: int) -> float:
    """The formula of the V family with k chunks' activations, at unit costs."""
    return max(0, 3 * P - 1 - 3 * k + max(3 * P, P - 1 + 2 * (1 + (k + 1) // 2))) / 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "pp"), SIZES)
def test_sound_within_its_memory_at_every_size(name, pp):
    counts = range(2 * pp, 4 * pp + 5, 2) if name == "dualpipe" else (*range(1, 2 * pp + 3), 4 * pp + 3)
    for microbatches in counts:
        simulation = planned(name, pp, microbatches).simulate()  # compiled, it is proved under `blocking`
        most, held = min(memory(name, pp), microbatches), max(simulation.peak_activations)
        assert held == most if name.startswith("dualpipe") else held <= most, microbatches
        assert simulation.busy == (3.0 * microbatches,) * pp


@settings(max_examples=100)
@given(P=st.integers(1, 12), extra=st.integers(0, 12), costs=st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_the_span_of_zbv(P, extra, costs):
    W, F, I = sorted(costs)  # noqa: E741
    M = 2 * P - 1 + extra
    simulation = planned("zbv", P, M).simulate(qs.Costs(forward=F, backward_input=I, backward_weight=W))
    assert simulation.span == M * (F + I + W) + (P - 1) * (I - W)
    assert simulation.peak_activations == (float(P),) * P


@settings(max_examples=100)
@given(name=st.sampled_from(["v-half", "v-min"]), P=st.integers(1, 16), extra=st.integers(0, 8))
def test_time_and_memory_of_v_half_and_v_min(name, P, extra):
    M, k = 2 * P + extra, int(memory(name, P))
    simulation = planned(name, P, M).simulate()
    assert max(simulation.peak_activations) == k
    assert simulation.span == 3 * M + idle(P, 2 * k)
    assert simulation.makespan == 3 * M + (0.5 if P == 2 else idle(P, 2 * k))


@pytest.mark.parametrize(("shape", "makespan"), FUSED.items(), ids=str)
def test_as_in_the_table_where_a_pair_is_one_block(shape, makespan):
    simulation, apart = (planned(*shape, overlap=overlap).simulate() for overlap in (True, False))
    assert simulation.makespan == makespan
    assert (simulation.busy, simulation.peak_activations) == (apart.busy, apart.peak_activations)


@settings(max_examples=120)
@given(
    name=st.sampled_from(["dualpipe", "dualpipe-v"]),
    half=st.integers(1, 5),
    extra=st.integers(0, 4),
    W=st.integers(0, 20),
    more=st.integers(0, 20),
    exchanges=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    data=st.data(),
)
def test_idle_time_is_the_papers_with_pairs_and_apart(name, half, extra, W, more, exchanges, data):
    """(PP/2-1)(F&B + B - 3W), arXiv:2412.19437, of the rank that idles most: F&B is the time of a pair, B a backward's.

    It holds where a forward is not longer than the input half of a backward; else it is a forward's time that counts.
    Apart, without exchanges, it is (PP/2-1)(F + B - 2W), where a forward is longer than that by W at most.
    """
    (in_forward, in_backward), I = exchanges, W + more  # noqa: E741
    F = data.draw(st.integers(max(I - W, 0), I + W))
    P = 2 * half if name == "dualpipe" else half
    M, steps = 2 * P + 2 * extra, P / 2 - 1 if name == "dualpipe" else (P - 1) / 2
    costs = qs.Costs(forward=F, backward_input=I, backward_weight=W, exchange=in_forward, exchange_backward=in_backward)
    simulation = planned(name, P, M, overlap=True).simulate(costs)
    pair = max(F + I + W, F + in_forward, I + W + in_backward)
    backward = max(I + in_backward, F + in_forward) + W
    assert simulation.makespan - min(simulation.busy) == steps * (pair + backward - 3 * W)
    F = max(F, I)
    alone = planned(name, P, M).simulate(qs.Costs(forward=F, backward_input=I, backward_weight=W))
    assert alone.makespan == M * (F + I + W) + steps * (F + I - W)


@settings(max_examples=60)
@given(
    pp=st.integers(1, 6), rounds=st.integers(1, 3), waves=st.integers(1, 3), costs=st.tuples(*[st.integers(0, 20)] * 3)
)
def test_time_and_memory_of_chimera_and_hanayo(pp, rounds, waves, costs):
    forward, backward = costs[0], costs[1] + costs[2]
    shorter, longer = sorted((forward, backward))
    times = qs.Costs(forward=forward, backward_input=costs[1], backward_weight=costs[2])
    found = planned("hanayo", pp, pp * rounds, chunks=2 * waves).simulate(times)
    wait = longer + (rounds - 1) * (longer - shorter)
    assert found.makespan - pp * rounds * sum(costs) == pytest.approx((pp - 1) * wait / waves)
    assert found.peak_activations == pytest.approx(tuple(pp - (pp - 1 - rank) / (2 * waves) for rank in range(pp)))
    pp += pp % 2
    found = planned("chimera", pp, pp * rounds).simulate(times)
    assert found.makespan - pp * rounds * sum(costs) == pytest.approx((pp - 2) * wait)
    assert found.peak_activations == tuple(float(pp // 2 + 1 + min(rank, pp - 1 - rank)) for rank in range(pp))
