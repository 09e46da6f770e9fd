"""Recomputation: every schedule stays sound and equivalent, memory falls, and plans that do it wrongly are refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, Fwd, Recompute, short
from quintsched.schedules import Order, Schedule, Shape
from quintsched.simulation.time_grid import time_grid
from quintsched.testing import assert_plan_sound
from tests.planner.passes.shapes import TRAINING, shapes_of
from tests.planner.verify.edits import Edit, add, drop, edited, move
from tests.planner.verify.judge import Judge


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_every_schedule_is_sound_with_recomputation(schedule, data):
    shape = data.draw(st.sampled_from(shapes_of(schedule)))
    stages = len(qs.compile(schedule, **shape).stage_to_pp)
    per_stage = st.lists(st.integers(0, 3), min_size=stages, max_size=stages)
    recompute = data.draw(st.integers(0, 2) | per_stage)
    plan = qs.compile(schedule, **shape, recompute=recompute)
    assert_plan_sound(plan)
    assert Judge(plan).good
    asked = [recompute] * stages if isinstance(recompute, int) else recompute
    assert [plan.layout.recomputes(stage) for stage in range(stages)] == [every > 0 for every in asked]
    for program in plan.programs:
        again = [(i.stage, i.microbatch) for i in program if isinstance(i, Recompute)]
        forwards = [(i.stage, i.microbatch) for i in program if isinstance(i, Fwd)]
        assert sorted(again) == sorted(place for place in forwards if asked[place[0]])


def test_it_stands_right_before_its_backward_and_does_not_wait_for_the_gradient():
    simulation = qs.compile("1f1b", mesh="pp=3", microbatches=3, recompute=1).simulate()
    assert time_grid(simulation) == [
        "rank 0 F0  F1  F2  RF0 .   .   .   .   B0  -   RF1 .   B1  -   RF2 .   B2  -",
        "rank 1 .   F0  F1  RF0 .   .   B0  -   F2  RF1 B1  -   RF2 .   B2  -   .   .",
        "rank 2 .   .   F0  RF0 B0  -   F1  RF1 B1  -   F2  RF2 B2  -   .   .   .   .",
    ]


def test_without_it_a_plan_is_as_before():
    plain = qs.compile("zb-h1", mesh="pp=2", microbatches=4)
    assert qs.compile("zb-h1", mesh="pp=2", microbatches=4, recompute=0) == plain
    assert qs.compile("zb-h1", mesh="pp=2", microbatches=4, recompute=(0, 0)) == plain
    assert "recompute" not in plain.to_json()
    assert plain.recompute == ()
    assert qs.compile("inference", mesh="pp=2", microbatches=2, recompute=0).recompute == ()


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_memory_falls(pp):
    """1F1B: what is in flight stands as checkpoints but for the one that is recomputed."""
    plan = qs.compile("1f1b", mesh=qs.Mesh(pp=pp), microbatches=2 * pp, recompute=1)
    costs = qs.Costs(activation=10.0, activation_checkpointed=1.0)
    assert plan.simulate(costs).peak_activations == tuple(pp - rank - 1 + 10.0 for rank in range(pp))
    assert max(plan.check().peak_activations) == 1.0, "by default a checkpoint holds nothing"
    assert plan.check(memory_cap=1).sound


def test_it_takes_the_time_that_is_given():
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=4, recompute=1)
    assert plan.simulate(qs.Costs(forward=2.0)).busy == (4 * 6.0,), "by default that of a forward"
    assert plan.simulate(qs.Costs(forward=2.0, recompute=1.5)).busy == (4 * 5.5,)
    chunked = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2, chunks=2, recompute=1)
    assert chunked.simulate(qs.Costs(recompute=3.0)).busy == (2 * 6.0,) * 2
    assert chunked.simulate(qs.Costs(recompute=(1.0, 2.0, 3.0, 4.0))).busy == (2 * 3.0 + 2 * 4, 2 * 3.0 + 2 * 6)


def eager(rank: int, shape: Shape) -> Order:
    """Recompute the first microbatch long before its backward, the others where the pass puts them."""
    yield from (Fwd(rank, microbatch) for microbatch in range(shape.microbatches))
    if shape.recompute and shape.recompute[rank]:
        yield Recompute(rank, 0)
    yield from (Bwd(rank, microbatch) for microbatch in reversed(range(shape.microbatches)))


def test_a_schedule_may_place_it_itself():
    schedule = Schedule("eager", eager, "", "", "")
    plan = qs.compile(schedule, mesh="pp=2", microbatches=3, recompute=(1, 0))
    order = [short(i, with_stage=False) for i in plan.programs[0] if isinstance(i, Fwd | Bwd | Recompute)]
    assert order == ["F0", "F1", "F2", "RF0", "RF2", "B2", "RF1", "B1", "B0"]
    assert_plan_sound(plan)
    assert_plan_sound(qs.compile(schedule, mesh="pp=2", microbatches=3))


def test_a_schedule_that_places_it_wrongly_is_refused():
    def twice(rank: int, shape: Shape) -> Order:
        yield from (Fwd(rank, 0), Recompute(rank, 0), Recompute(rank, 0), Bwd(rank, 0))

    schedule = Schedule("twice", twice, "", "", "")
    for recompute, words in ((1, "2 times instead of once"), (0, "2 times instead of never")):
        with pytest.raises(qs.UnsoundError, match=rf"rank 0 runs Recompute\(stage=0, microbatch=0\) {words}"):
            qs.compile(schedule, mesh="pp=1", microbatches=1, recompute=recompute)


PLAN = qs.compile("1f1b", mesh="pp=2", microbatches=2, recompute=1)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            add(Recompute(0, 0), before=Bwd(0, 0)),
            "rank 0 runs Recompute(stage=0, microbatch=0) 2 times instead of once",
        ),
        (drop(Recompute(0, 1)), "rank 0 runs Recompute(stage=0, microbatch=1) 0 times instead of once"),
        (
            move(Recompute(0, 1), after=Bwd(0, 1)),
            "needs the saved activations of stage 0, microbatch 1, made only later, by rank 0 instruction",
        ),
        (
            move(Recompute(0, 0), before=Fwd(0, 0)),
            "needs the checkpoint of stage 0, microbatch 0, made only later, by rank 0 instruction 1, Fwd",
        ),
    ],
)
def test_a_broken_plan_is_refused(edit: Edit, words: str):
    broken = edited(PLAN, 0, edit)
    assert words in broken.check(profile="blocking").explain()
    assert not Judge(broken).good
    with pytest.raises(qs.UnsoundError):
        broken.check().raise_if_unsound()


def test_nothing_is_recomputed_that_was_kept():
    kept = replace(PLAN, recompute=(0, 1))
    assert "rank 0 runs Recompute(stage=0, microbatch=0) 1 times instead of never" in kept.check().explain()


def test_slices_need_the_keys_before_them():
    plan = qs.compile("seq-1f1b", mesh="pp=1", microbatches=1, slices=2, recompute=1)
    assert [short(i, with_stage=False) for i in plan.programs[0]][:6] == ["F0", "F1", "RF1", "B1", "RF0", "B0"]
    explained = edited(plan, 0, move(Recompute(0, 1), after=Fwd(0, 0))).check().explain()
    assert "needs the checkpoint of stage 0, microbatch 1, made only later" in explained
