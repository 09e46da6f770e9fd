"""Schedules in a V and both ways, as in their papers; placements in which a schedule's stage is a run of stages."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Compute
from quintsched.schedules import all_schedules, find_schedule
from quintsched.schedules.kit.uneven_stages import find_runs
from quintsched.testing import assert_plan_sound

BUILT_IN = tuple(schedule for schedule in all_schedules() if schedule.built_in)
FOLLOWING = tuple(schedule for schedule in BUILT_IN if not schedule.any_placement)


def computations(plan: qs.Plan, own_of: dict[int, int]) -> list[list[Compute]]:
    """Each rank's computations in the schedule's own stages, those of a run as one."""
    return [
        [key for key, _ in groupby(type(i)(own_of[i.stage], i.microbatch) for i in program if isinstance(i, Compute))]
        for program in plan.programs
    ]


@settings(max_examples=100)
@given(data=st.data(), schedule=st.sampled_from(FOLLOWING), pp=st.integers(1, 4), rounds=st.integers(1, 2))
def test_runs_of_any_lengths_compute_in_the_schedules_own_order(data, schedule, pp, rounds):
    pp += pp % 2 if schedule.bidirectional else 0
    microbatches = rounds * pp * (2 if schedule.bidirectional else 1)
    slices = data.draw(st.integers(1, 2)) if schedule.max_slices > 1 else 1
    plain = qs.compile(schedule, mesh={"pp": pp}, microbatches=microbatches, slices=slices)
    own, ways = plain.stage_to_pp, len(plain.routes)
    size = len(own) // ways
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=size, max_size=size)) * ways
    where = tuple(rank for rank, length in zip(own, lengths, strict=True) for _ in range(length))
    plan = qs.compile(schedule, mesh={"pp": pp}, microbatches=microbatches, slices=slices, stage_to_pp=where)
    assert_plan_sound(plan)
    runs = find_runs(schedule, own, where)
    if runs is None:
        assert where == own
        return
    assert [len(run) > 0 for run in runs.stages] == [True] * len(own)
    assert [stage for run in runs.stages for stage in run] == [*range(len(where))]
    own_of = {stage: number for number, run in enumerate(runs.stages) for stage in run}
    assert [own[own_of[stage]] for stage in own_of] == [*where]
    if not schedule.searches:  # what it finds depends on what its stages cost
        assert computations(plan, own_of) == computations(plain, {stage: stage for stage in range(len(own))})


def test_a_schedules_own_placement_is_no_run_and_changes_no_byte():
    for schedule in BUILT_IN:
        shape = {"mesh": "dp=2,pp=2", "microbatches": 4}
        plain = qs.compile(schedule, **shape)
        assert qs.compile(schedule, **shape, stage_to_pp=plain.stage_to_pp).to_json() == plain.to_json()


def test_what_does_not_follow_is_refused_as_ever():
    for schedule, where in (
        ("1f1b", [0, 1, 0]),
        ("1f1b", [0, 0]),
        ("zb-h1", [1, 0, 0, 1]),
        ("interleaved-1f1b", [0, 0, 1]),
        ("zbv", [0, 1, 0, 1]),
        ("zbv", [1, 0, 1]),
        ("dualpipe", [0, 0, 1, 1, 0]),
        ("dualpipe", [0, 0, 1, 1, 0, 0]),
    ):
        own = ", ".join(map(str, find_schedule(schedule).placed(2, None)))
        words = rf"{schedule}: it cannot run with stage_to_pp=.*; its own placement is \[{own}\]"
        with pytest.raises(qs.UsageError, match=words):
            qs.compile(schedule, mesh="pp=2", microbatches=4, stage_to_pp=where)


def test_a_search_knows_how_many_blocks_stages_have():
    by_blocks = qs.compile("zb-auto", mesh="pp=3", microbatches=6, stages=[1, 1, 4])
    names = ("forward", "backward_input", "backward_weight", "activation")
    third = qs.Costs(**dict.fromkeys(names, (0.5, 0.5, 2.0)))
    assert by_blocks.programs == qs.compile("zb-auto", mesh="pp=3", microbatches=6, costs=third).programs
    assert by_blocks.programs != qs.compile("zb-auto", mesh="pp=3", microbatches=6).programs


@pytest.mark.parametrize(
    ("schedule", "blocks", "words"),
    [
        ("1f1b", [3, 4, 4], r"1f1b: stages: blocks are given for 3 stages \(3,4,4\), but there are 2"),
        ("1f1b", [0, 4], "1f1b: stages: stage 0 has no blocks, but it is a first stage"),
        ("1f1b", [2**24 + 1, 1], "1f1b: stages: a stage of 16777217 blocks; give a whole number from 0 to 16777216"),
        ("1f1b", [-1, 4], r"stages is \[-1, 4\]; give a whole number from 0 on for each stage"),
        ("1f1b", [], r"stages is \[\]; give a whole number from 0 on"),
        ("1f1b", [1.5, 2], "stages is 1.5; give a whole number"),
        ("1f1b", 3, "stages is 3; give whole numbers"),
        ("dualpipe", [3, 4, 4, 3], "stages 0 and 2 hold the same piece of the model, but have 3 and 4 blocks"),
        ("dualpipe", [3, 4, 0, 4], "stage 2 has no blocks, but it is a first stage"),
    ],
)
def test_blocks_that_stages_cannot_have_are_refused(schedule, blocks, words):
    with pytest.raises(qs.UsageError, match=words):
        qs.compile(schedule, mesh="pp=2", microbatches=4, stages=blocks)


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
