"""Schedules with their pairs side by side: sound at all shapes and settings, and refused where there are no pairs."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, FreeParams, Fwd, GatherParams, Instruction, Overlap
from quintsched.plan import Plan
from quintsched.schedules import all_schedules, find_schedule
from quintsched.verify.equivalence import equivalence

SCHEDULES = [schedule.name for schedule in all_schedules() if schedule.overlaps]
MESHES = ("pp={}", "dp=2,pp={}", "pp={},tp=2", "dp=2,ep=2,pp={}", "pp={},cp=2")


@st.composite
def requests(draw: st.DrawFn, meshes: Sequence[str] = MESHES) -> dict[str, object]:
    """Draw a request, at any number of microbatches that the schedule takes, with all that passes look at."""
    schedule = find_schedule(draw(st.sampled_from(SCHEDULES)))
    pp = 2 * draw(st.integers(1, 2)) if schedule.bidirectional else draw(st.integers(1, 5))
    chunks = draw(st.integers(schedule.min_chunks, min(schedule.max_chunks, 3)))
    microbatches = draw(st.integers(1, 14))
    if schedule.bidirectional:
        microbatches = 2 * pp + 2 * (microbatches // 3)
    elif schedule.name == "interleaved-1f1b":
        microbatches = pp * (1 + microbatches // 5)
    mesh = draw(st.sampled_from(meshes)).format(pp)
    has_replicas = any(axis in mesh for axis in ("dp", "ep", "cp"))
    zero = draw(st.integers(0, 3)) if has_replicas else 0
    asked: dict[str, object] = {
        "schedule": schedule,
        "mesh": mesh,
        "microbatches": microbatches,
        "chunks": chunks,
        "zero": zero,
        "buckets_per_stage": draw(st.integers(1, 3)),
    }
    try:
        stages = len(qs.compile(**asked).stage_to_pp)
        if draw(st.booleans()):
            asked["stage_to_pp"] = draw(uneven(qs.compile(**asked).stage_to_pp))
            stages = len(qs.compile(**asked).stage_to_pp)
    except qs.UsageError:
        assume(False)
    asked["zero_every"] = draw(st.integers(1, microbatches)) if zero >= 2 else 1
    asked["recompute"] = draw(st.sampled_from([0, 1]) | st.lists(st.integers(0, 1), min_size=stages, max_size=stages))
    if not schedule.bidirectional and stages > 1:
        asked["tied"] = draw(st.sampled_from([{}, {"embedding": (0, stages - 1)}]))
    return asked


def uneven(stage_to_pp: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Draw a placement in which some stages are runs of several, or missing."""
    counts = st.lists(st.sampled_from([1, 1, 2, 0]), min_size=len(stage_to_pp), max_size=len(stage_to_pp))
    return counts.map(lambda found: [pp for pp, count in zip(stage_to_pp, found, strict=True) for _ in range(count)])


def sides_of(plan: Plan, rank: int) -> list[Instruction]:
    return [side for i in plan.programs[rank] for side in i.sides if isinstance(side, Fwd | Bwd)]


@settings(max_examples=80, deadline=None)
@given(asked=requests())
def test_what_overlaps_is_sound_means_the_same_and_comes_back_from_its_file(asked):
    plan, apart = qs.compile(**asked, overlap=True), qs.compile(**asked)
    assert plan.check(profile="blocking").sound
    assert equivalence(plan).holds
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert plan.schedule.options["overlap"] is True
    assert not len(apart.columns.rows_where(Overlap))
    assert "overlap" not in apart.schedule.options
    for rank in range(plan.mesh.pp):
        assert set(sides_of(plan, rank)) == set(sides_of(apart, rank)), "the same is computed"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_most_forwards_have_a_backward_beside_them(name, pp):
    microbatches = 6 * pp
    plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, overlap=True)
    forwards = plan.columns.apart.columns.rows_where(Fwd)
    assert len(plan.columns.rows_where(Overlap)) >= 0.6 * len(forwards)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_apart_the_pairs_are_the_order_without_overlap(name):
    plan, apart = (qs.compile(name, mesh="pp=4", microbatches=12, overlap=overlap) for overlap in (True, False))
    for rank in range(4):
        together = [side for i in plan.programs[rank] if i.computes for side in i.sides]
        assert together == [i for i in apart.programs[rank] if i.computes]


@settings(max_examples=40, deadline=None)
@given(asked=requests(["dp=2,pp={}", "pp={},cp=2"]))
def test_weights_that_pairs_need_are_there_and_few_at_once(asked):
    """Check that weights of both sides are resident while a pair runs, and at most the next computation's besides."""
    plan = qs.compile(**{**asked, "zero": 3}, overlap=True)
    for program in plan.programs:
        resident: set[int] = set()
        for i in program:
            if isinstance(i, GatherParams):
                resident.add(i.stage)
            elif isinstance(i, FreeParams):
                resident.remove(i.stage)
            elif isinstance(i, Overlap):
                assert {i.forward[0], i.backward[0]} <= resident
            assert len(resident) <= 4


@pytest.mark.parametrize("value", [1, "yes", None, "true"])
def test_overlap_is_true_or_false(value):
    with pytest.raises(qs.UsageError, match=r"overlap.*give true or false"):
        qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=value)
