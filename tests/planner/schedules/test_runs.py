"""Placements that follow a schedule's own: each stage of the schedule is a run of the plan's stages, or has none."""

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
        ("1f1b", 3, "stages is 3; give whole numbers"),
        ("dualpipe", [3, 4, 4, 3], "stages 0 and 2 hold the same piece of the model, but have 3 and 4 blocks"),
        ("dualpipe", [3, 4, 0, 4], "stage 2 has no blocks, but it is a first stage"),
    ],
)
def test_blocks_that_stages_cannot_have_are_refused(schedule, blocks, words):
    with pytest.raises(qs.UsageError, match=words):
        qs.compile(schedule, mesh="pp=2", microbatches=4, stages=blocks)
