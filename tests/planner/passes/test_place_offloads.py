"""Activations under a cap: what goes to the host, when it comes back, what that holds and how long it takes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.formats.promela import to_promela
from quintsched.graph.transport_profiles import PROFILES
from quintsched.instructions import (
    BEGINS_BACKWARD,
    Bwd,
    Compute,
    FetchAct,
    Fwd,
    HostCopy,
    Instruction,
    OffloadAct,
    short,
)
from quintsched.passes.place_offloads import least_cap
from quintsched.plan import Plan
from quintsched.simulation.simulator import Simulation
from quintsched.verify.equivalence import equivalence
from tests.planner.passes.shapes import TRAINING
from tests.planner.verify.mutants import with_program

LIGHT = qs.Costs(activation_after_input=0.25)
"""Costs under which split backwards, too, let go of most of what they hold."""


def letters(plan: Plan, rank: int) -> str:
    """A rank's computations and copies in a few letters."""
    return " ".join(short(i, with_stage=False) for i in plan.programs[rank] if isinstance(i, Compute | HostCopy))


def spans(simulation: Simulation, rank: int) -> dict[str, tuple[float, float]]:
    return {short(s.instruction, with_stage=False): (s.start, s.end) for s in simulation.timeline[rank]}


def copies(plan: Plan) -> list[Instruction]:
    return [i for program in plan.programs for i in program if isinstance(i, HostCopy)]


def without_copies(plan: Plan) -> list[list[Instruction]]:
    return [[i for i in program if not isinstance(i, HostCopy)] for program in plan.programs]


def test_what_is_not_the_newest_goes_and_comes_back_one_computation_ahead() -> None:
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=8, offload=2)
    assert letters(plan, 0).startswith("F0 F1 OA0 F2 OA1 F3 OA2 FA0 B0 OA3 FA1 F4 B1 OA4 FA2 F5 B2 OA5 FA3 F6 B3 OA6")
    assert letters(plan, 0).endswith("FA4 F7 B4 OA7 FA5 FA6 B5 FA7 B6 B7")
    assert letters(plan, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7", "it holds less than that anyway"


def test_a_copy_begins_with_its_forwards_end_and_what_is_behind_its_place_waits() -> None:
    """By hand: a copy takes 3, a forward 1, a backward 2. The first backward comes at once: so the newest has to go."""
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=3, offload=2)
    assert letters(plan, 0) == "F0 F1 OA1 F2 B0 FA1 B1 B2"
    found = spans(plan.simulate(qs.Costs(host_bandwidth=1 / 3)), 0)
    assert [found[name] for name in ("F0", "F1", "OA1", "F2")] == [(0, 1), (1, 2), (2, 5), (5, 6)]
    assert [found[name] for name in ("B0", "FA1", "B1", "B2")] == [(6, 8), (8, 11), (11, 13), (13, 15)]


def test_copies_of_one_way_queue_and_run_beside_computation() -> None:
    """By hand, a copy takes 2: that of 1 begins when that of 0 has ended, and the forward of 3 waits for it."""
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=8, offload=2)
    found = spans(plan.simulate(qs.Costs(host_bandwidth=1.0, host_latency=1.0)), 0)
    assert [found[name] for name in ("F0", "F1", "F2", "F3")] == [(0, 1), (1, 2), (3, 4), (5, 6)]
    assert [found[name] for name in ("OA0", "OA1", "OA2")] == [(1, 3), (3, 5), (5, 7)]
    assert found["FA0"] == (7, 9), "its room is that of microbatch 2"


def test_time_is_by_what_a_stage_holds_and_chunks_are_smaller() -> None:
    uneven = qs.Costs(activation=(3.0, 1.0), host_bandwidth=2.0, host_latency=0.5)
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=4, offload=9, costs=uneven)
    assert {short(i, with_stage=False) for i in copies(plan)} == {"OA1", "OA2", "FA1", "FA2"}
    assert spans(plan.simulate(uneven), 0)["OA1"] == (2, 4), "0.5 + 3 / 2"
    assert plan.simulate(uneven).peak_activations == (9.0, 4.0)
    chunked = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4, offload=0.5)
    lasted = {s.end - s.start for row in chunked.simulate(qs.Costs(host_bandwidth=2.0)).timeline for s in row}
    assert 0.25 in lasted, "half a rank's activations"


def taken(schedule: qs.Schedule) -> list[tuple[int, int]]:
    """Return the small numbers of ranks and microbatches that a schedule takes."""
    found = []
    for pp, microbatches in product(range(1, 5), range(1, 11)):
        with suppress(qs.UsageError):
            schedule.shape(pp, microbatches, None, min(2, schedule.max_slices))
            found.append((pp, microbatches))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@settings(max_examples=15)
@given(data=st.data(), more=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), zero=st.booleans())
def test_any_cap_is_kept_and_proved(schedule: qs.Schedule, data: st.DataObject, more: float, zero: bool) -> None:
    pp, microbatches = data.draw(st.sampled_from(taken(schedule)))
    shape = {"mesh": f"dp={1 + zero},pp={pp}", "microbatches": microbatches, "slices": min(2, schedule.max_slices)}
    shape |= {"zero": 3 * zero}
    searched = {"costs": LIGHT} if schedule.searches else {}
    free = qs.compile(schedule, **shape, **searched)
    cap = least_cap(free, LIGHT) + more
    plan = qs.compile(schedule, **shape, costs=LIGHT, offload=cap)
    simulation = plan.simulate(LIGHT)
    assert max(simulation.peak_activations) <= cap
    assert list(plan.check().profiles.values()) == [True] * len(PROFILES)
    assert equivalence(plan).holds
    assert qs.Plan.from_json(plan.to_json()) == plan
    assert without_copies(plan) == [[*program] for program in free.programs]
    gone = [i for i in copies(plan) if isinstance(i, OffloadAct)]
    assert len({*gone}) == len(gone) == len(copies(plan)) / 2
    if cap >= max(free.simulate(LIGHT).peak_activations):
        assert not gone
    assert_links_carry_one_at_a_time(plan.simulate(LIGHT.model_copy(update={"host_bandwidth": 0.7})))


def assert_links_carry_one_at_a_time(simulation: Simulation) -> None:
    """Each copy runs within its bounds: from its forward to what is behind its place, or from there to its backward."""
    for program, row in zip(simulation.plan.programs, simulation.timeline, strict=True):
        at = {
            (type(s.instruction), *_cell(s.instruction)): s
            for s in row
            if isinstance(s.instruction, Compute | HostCopy)
        }
        for kind in (OffloadAct, FetchAct):
            ran = [span for span in row if isinstance(span.instruction, kind)]
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(ran))
        for index, (i, span) in enumerate(zip(program, row, strict=True)):
            before = [s for s in row[:index] if isinstance(s.instruction, Compute)]
            behind = [s for s in row[index:] if isinstance(s.instruction, Compute)]
            if isinstance(i, OffloadAct):
                assert span.start >= at[Fwd, *_cell(i)].end - 1e-9
                assert span.end <= behind[0].start + 1e-9
            elif isinstance(i, FetchAct):
                assert span.start >= before[-1].end - 1e-9
                assert span.end <= min(at[k, *_cell(i)].start for k in BEGINS_BACKWARD if (k, *_cell(i)) in at) + 1e-9


def _cell(i: Instruction) -> tuple[int, int]:
    return i.stage, i.microbatch


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "eager-1f1b", "dualpipe"])
def test_copies_that_are_quick_enough_cost_no_time(schedule: str) -> None:
    free = qs.compile(schedule, mesh="pp=4", microbatches=16)
    costs = qs.Costs(host_bandwidth=1.0)
    peak = max(free.simulate().peak_activations)
    capped = qs.compile(schedule, mesh="pp=4", microbatches=16, offload=3)
    assert max(capped.simulate(costs).peak_activations) == 3 < peak
    assert capped.simulate(costs).makespan == free.simulate(costs).makespan


def test_the_host_holds_the_rest() -> None:
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=8, offload=3)
    simulation = plan.simulate()
    assert simulation.peak_activations == (3.0, 3.0)
    assert simulation.peak_host == (6.0, 6.0)
    assert simulation.summary()["peak_host"] == [6.0, 6.0]
    assert qs.compile("gpipe", mesh="pp=2", microbatches=8).simulate().peak_host == (0.0, 0.0)


def test_a_cap_that_is_too_small_names_the_least_that_works() -> None:
    with pytest.raises(qs.UsageError, match=r"1f1b: offload is 0.5, but .*; the least that works: 1$"):
        qs.compile("1f1b", mesh="pp=4", microbatches=8, offload=0.5)
    with pytest.raises(qs.UsageError, match=r"the least that works: 0\.5"):
        qs.compile("zbv", mesh="pp=2", microbatches=4, offload=0, costs=qs.Costs(activation_after_input=0.0))
    with pytest.raises(qs.UsageError, match=r"the least that works: 2\.5"):
        qs.compile("1f1b", mesh="pp=2", microbatches=4, offload=2.0, costs=qs.Costs(activation=(1.0, 2.5)))
    qs.compile("1f1b", mesh="pp=2", microbatches=4, offload=2.5, costs=qs.Costs(activation=(1.0, 2.5)))
    with pytest.raises(qs.UsageError, match="offload: the plan only computes forward"):
        qs.compile("inference", mesh="pp=2", microbatches=4, offload=1)


def test_what_is_recomputed_stays_and_the_others_go() -> None:
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4, recompute=[0, 1, 0, 1], offload=0.5)
    assert {i.stage for i in copies(plan)} == {0, 2}
    assert max(plan.simulate().peak_activations) == 0.5


def test_stages_of_other_sizes_hold_by_their_blocks() -> None:
    """Stages of 6 and 2 blocks: a rank's worth is 4."""
    shape = {"mesh": "pp=2", "microbatches": 4, "stages": [6, 2]}
    with pytest.raises(qs.UsageError, match=r"the least that works: 1\.5$"):
        qs.compile("gpipe", **shape, offload=1)
    plan = qs.compile("gpipe", **shape, offload=3)
    assert plan.simulate().peak_activations == (3.0, 2.0)
    assert plan.check(memory_cap=3).sound


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v", "interleaved-1f1b"])
def test_sides_of_overlaps_are_moved_like_others(schedule: str) -> None:
    shape = {"mesh": "pp=2,tp=2", "microbatches": 8, "overlap": True}
    free = qs.compile(schedule, **shape)
    for cap in (least_cap(free), least_cap(free) + 0.5):
        plan = qs.compile(schedule, **shape, offload=cap)
        assert copies(plan)
        assert max(plan.simulate().peak_activations) <= cap < max(free.simulate().peak_activations)
        assert equivalence(plan).holds
        assert [i for p in plan.programs for i in p if not isinstance(i, HostCopy)] == [
            i for p in free.programs for i in p
        ]


def test_a_plan_says_how_it_was_capped_and_others_keep_their_title() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4, offload=1)
    assert plan.schedule.options == {"offload": 1.0}
    assert plan.title == "1f1b on pp=2, 4 microbatches, offloading"
    assert qs.compile("1f1b", mesh="pp=2", microbatches=4).schedule.options == {}


PLAN = qs.compile("1f1b", mesh="pp=2", microbatches=4, offload=1)


def changed(kind: type[HostCopy], *program: Instruction) -> str:
    """Return the verdict of `check` if the first copy of a kind is replaced."""
    found = list(PLAN.programs[0])
    place = next(k for k, i in enumerate(found) if isinstance(i, kind))
    found[place : place + 1] = program
    broken = with_program(PLAN, 0, found)
    assert not equivalence(broken).holds
    return broken.check().explain()


def test_what_goes_has_to_come_back_and_what_comes_back_to_have_gone() -> None:
    assert letters(PLAN, 0).startswith("F0 OA0 F1 OA1 FA0 B0")
    words = changed(OffloadAct)
    assert (
        "FetchAct(stage=0, microbatch=0) needs the offloaded activations of stage 0, microbatch 0, which not" in words
    )
    assert "Fwd(stage=0, microbatch=0) makes the saved activations of stage 0, microbatch 0, and nothing" in words
    words = changed(FetchAct)
    assert "Bwd(stage=0, microbatch=0) needs the saved activations of stage 0, microbatch 0, which rank 0" in words
    assert "OffloadAct(stage=0, microbatch=0) has already taken" in words
    assert "a second time" in changed(FetchAct, FetchAct(0, 0), FetchAct(0, 0))
    assert "made only later" in changed(OffloadAct, FetchAct(0, 0), OffloadAct(0, 0))


def test_a_copy_that_names_nothing_is_malformed() -> None:
    assert "stage 1 is on rank 1, not on rank 0" in changed(OffloadAct, OffloadAct(1, 0))
    assert "microbatch 9 is out of range" in changed(OffloadAct, OffloadAct(0, 9))
    dropped = qs.compile("1f1b", mesh="pp=1", microbatches=1, recompute=1)
    program = list(dropped.programs[0])
    program[1:1] = [OffloadAct(0, 0), FetchAct(0, 0)]
    assert "stage 0 is recomputed: it drops its activations" in with_program(dropped, 0, program).check().explain()


def test_spin_gets_a_process_for_each_way() -> None:
    assert "OffloadAct(stage=0" in to_promela(PLAN).split("active proctype rank_0()")[1]
    text = to_promela(PLAN, profile="channel")
    assert "active proctype rank_0_offload()" in text
    assert "active proctype rank_0_fetch()" in text


def test_a_plan_by_hand_may_move_what_it_likes() -> None:
    """Right after the forward, and right before the backward."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    programs = []
    for program in plan.programs:
        found: list[Instruction] = []
        for i in program:
            found += [FetchAct(i.stage, i.microbatch)] if isinstance(i, Bwd) else []
            found += [i, *([OffloadAct(i.stage, i.microbatch)] if isinstance(i, Fwd) else [])]
        programs.append(tuple(found))
    moved = replace(plan, programs=tuple(programs))
    assert moved.check(profile="blocking", memory_cap=1).sound
    assert equivalence(moved).holds
    assert moved.simulate().peak_activations == (1.0, 1.0)
