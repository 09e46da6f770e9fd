"""DualPipe and DualPipeV: soundness at all sizes, the table, idle time, twins, and sizes that are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import AllReduceBucket, Bwd, BwdInput, Fwd, SyncTied
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs

FUSED = {("dualpipe", 4, 8): 26, ("dualpipe", 8, 16): 54, ("dualpipe-v", 4, 8): 27, ("dualpipe-v", 8, 16): 55}
"""The makespans that the table's note states where a pair is one block."""


def planned(name: str, P: int, M: int, *, overlap: bool = False) -> Plan:
    return qs.compile(name, mesh=qs.Mesh(pp=P), microbatches=M, overlap=overlap)


@pytest.mark.parametrize(("shape", "makespan"), FUSED.items(), ids=str)
def test_as_in_the_table_where_a_pair_is_one_block(shape, makespan):
    simulation = planned(*shape, overlap=True).simulate()
    assert simulation.makespan == makespan
    apart = planned(*shape).simulate()
    assert (simulation.busy, simulation.peak_activations) == (apart.busy, apart.peak_activations)


@pytest.mark.parametrize("pp", range(1, 10))
def test_dualpipe_v_is_sound_at_every_size(pp):
    for microbatches in (*range(1, 2 * pp + 3), 4 * pp + 3):
        simulation = planned("dualpipe-v", pp, microbatches).simulate()
        assert max(simulation.peak_activations) == min(pp + 0.5, microbatches)
        assert simulation.busy == (3.0 * microbatches,) * pp


@pytest.mark.parametrize("pp", [2, 4, 6, 8, 10])
def test_dualpipe_is_sound_at_every_size(pp):
    for microbatches in range(2 * pp, 4 * pp + 5, 2):
        simulation = planned("dualpipe", pp, microbatches).simulate()
        assert simulation.peak_activations == (pp + 1.0,) * pp
        assert simulation.busy == (3.0 * microbatches,) * pp


@settings(max_examples=200)
@given(
    name=st.sampled_from(["dualpipe", "dualpipe-v"]),
    half=st.integers(1, 6),
    extra=st.integers(0, 6),
    W=st.integers(0, 40),
    data=st.data(),
)
def test_idle_time(name, half, extra, W, data):
    I = W + data.draw(st.integers(0, 40))  # noqa: E741
    F = I + data.draw(st.integers(0, W))
    P = 2 * half if name == "dualpipe" else half
    M = 2 * P + 2 * extra
    simulation = planned(name, P, M).simulate(Costs(forward=F, backward_input=I, backward_weight=W))
    steps = P / 2 - 1 if name == "dualpipe" else (P - 1) / 2
    assert simulation.makespan == M * (F + I + W) + steps * (F + I - W)


@settings(max_examples=200)
@given(
    name=st.sampled_from(["dualpipe", "dualpipe-v"]),
    half=st.integers(1, 5),
    extra=st.integers(0, 4),
    W=st.integers(0, 20),
    more=st.integers(0, 20),
    exchanges=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    data=st.data(),
)
def test_idle_time_of_pairs_is_the_papers(name, half, extra, W, more, exchanges, data):
    """(PP/2-1)(F&B + B - 3W), arXiv:2412.19437, of the rank that idles most: F&B is the time of a pair, B a backward's.

    It holds where a forward is not longer than the input half of a backward; else it is a forward's time that counts.
    """
    (in_forward, in_backward), I = exchanges, W + more  # noqa: E741
    F = data.draw(st.integers(max(I - W, 0), I + W))
    P = 2 * half if name == "dualpipe" else half
    costs = Costs(forward=F, backward_input=I, backward_weight=W, exchange=in_forward, exchange_backward=in_backward)
    simulation = planned(name, P, 2 * P + 2 * extra, overlap=True).simulate(costs)
    pair = max(F + I + W, F + in_forward, I + W + in_backward)
    backward = max(I + in_backward, F + in_forward) + W
    steps = P / 2 - 1 if name == "dualpipe" else (P - 1) / 2
    assert simulation.makespan - min(simulation.busy) == steps * (pair + backward - 3 * W)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_pairs_hide_all_of_the_exchanges_between_their_ends(name):
    """With exchanges half as long as a forward; only those outside of the pairs are left."""
    costs, microbatches = Costs(exchange=0.5), 40
    for pp in (2, 4, 8):
        pairs, apart = (planned(name, pp, microbatches, overlap=overlap).simulate(costs) for overlap in (True, False))
        assert pairs.makespan < apart.makespan
        assert apart.exchange == (microbatches * 1.0,) * pp
        alone = [[side for i in p for side in i.sides if i.computes and len(i.sides) == 1] for p in pairs.plan.programs]
        exchanging = [sum(isinstance(i, Fwd | Bwd | BwdInput) for i in program) for program in alone]
        share = 0.5 / pairs.plan.schedule.chunks
        assert pairs.exchange == pytest.approx([count * share for count in exchanging])


def test_twins_add_up_their_gradients_before_the_replicas_do():
    plan = qs.compile("dualpipe", mesh="dp=2,pp=4", microbatches=8)
    assert plan.stage_to_pp == (0, 1, 2, 3, 3, 2, 1, 0)
    assert plan.stage_to_part == (0, 1, 2, 3, 0, 1, 2, 3)
    assert [route.microbatches for route in plan.routes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [[*i.stages] for i in plan.programs[1] if isinstance(i, SyncTied)] == [[1, 5], [2, 6]]
    for program in plan.programs:
        added = {stage: k for k, i in enumerate(program) if isinstance(i, SyncTied) for stage in i.stages}
        reduced = {i.stage: k for k, i in enumerate(program) if isinstance(i, AllReduceBucket)}
        assert len(reduced) == 2
        assert all(added[stage] < reduced[stage] for stage in reduced)
