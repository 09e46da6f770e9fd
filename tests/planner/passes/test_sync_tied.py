"""Named tied weights: every schedule adds them up soundly, and plans that do it wrongly are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.graph.plan_events import Events
from quintsched.ir.instruction_set import AllReduceBucket, Bwd, BwdWeight, Instruction, OptStep, SyncTied
from quintsched.plan import Plan
from quintsched.testing import assert_plan_sound
from quintsched.verify.equivalence import equivalence
from tests.planner.passes.shapes import TRAINING, shapes_of
from tests.planner.verify.edits import Edit, add, drop, edited, move, put, swap
from tests.planner.verify.judge import Judge
from tests.planner.verify.mutants import with_program


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "schedule", [found for found in TRAINING if not found.bidirectional], ids=lambda schedule: schedule.name
)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_every_schedule_is_sound_with_tied_weights(schedule, data):
    shape = data.draw(st.sampled_from([shape for shape in shapes_of(schedule) if shape["mesh"] != "pp=1"]))
    stages = len(qs.compile(schedule, **shape).stage_to_pp)
    holders = st.sets(st.integers(0, stages - 1), min_size=2).map(sorted)
    tied = data.draw(st.dictionaries(st.sampled_from(["embedding", "head", "norm", "a"]), holders, min_size=1))
    plan = qs.compile(schedule, **shape, tied=tied, recompute=data.draw(st.integers(0, 1)))
    assert_plan_sound(plan)
    assert Judge(plan).good
    for rank, program in enumerate(plan.programs):
        assert_each_is_added_up_once(plan, rank, program)


def assert_each_is_added_up_once(plan: Plan, rank: int, program: tuple[Instruction, ...]) -> None:
    syncs = {i: index for index, i in enumerate(program) if isinstance(i, SyncTied)}
    mine = {*plan.layout.stages_of(rank)}
    assert {(i.params, i.stages) for i in syncs} == {item for item in plan.tied.items() if mine & {*item[1]}}
    assert len(syncs) == sum(isinstance(i, SyncTied) for i in program)
    for sync, place in syncs.items():
        for index, i in enumerate(program):
            if isinstance(i, Bwd | BwdWeight) and i.stage in sync.stages:
                assert index < place
            if isinstance(i, AllReduceBucket) and i.stage in sync.stages:
                assert index > place


def test_stages_on_one_rank_add_up_among_themselves():
    plan = qs.compile("zbv", mesh="pp=2", microbatches=4, tied={"embedding": (0, 3)})
    assert plan.stage_to_pp == (0, 1, 1, 0)
    assert [i for i in plan.programs[0] if isinstance(i, SyncTied)] == [SyncTied("embedding", (0, 3))]
    assert not any(isinstance(i, SyncTied) for i in plan.programs[1])
    rows = [row for row, i in enumerate(plan.programs[0]) if isinstance(i, SyncTied)]
    assert Events.merge(plan).groups[rows].tolist() == [-1], "it is no collective: nobody else takes part"
    assert_plan_sound(plan)
    alone = qs.compile("interleaved-1f1b", mesh="dp=2,pp=1", microbatches=2, chunks=2, tied={"embedding": (0, 1)})
    assert_plan_sound(alone)


def test_tied_weights_change_the_gradient():
    """The symbolic run sees whether the sums over stages are there at all."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2, tied={"embedding": (0, 1)})
    programs = tuple(tuple(i for i in program if not isinstance(i, SyncTied)) for program in plan.programs)
    without = qs.Plan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"programs": programs})
    for stage in range(2):
        words = f"the optimizer steps stage {stage} with another gradient than the sequential program's"
        assert words in equivalence(without).explain()


PLAN = qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=3, tied={"a": (0, 1, 2), "embedding": (0, 2), "z": (0, 2)})


A, EMBEDDING, Z = (SyncTied(name, stages) for name, stages in PLAN.tied.items())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop(EMBEDDING), "which nothing on its rank makes"),
        (drop(EMBEDDING), "all members must issue the same collectives in the same order"),
        (move(Z, after=AllReduceBucket), "needs the tied gradient of stage 0, tie 3, made only later"),
        (move(A, before=Bwd(0, 2)), "needs the weight gradient of stage 0, microbatch 2, made only later"),
        (swap(EMBEDDING, Z), "all members must issue the same collectives in the same order"),
        (move(A, after=Z), "close a circle"),
        (add(A, before=OptStep), "makes the tied gradient of stage 0, tie 1 a second time"),
        (put(Z, SyncTied("y", (0, 2))), "the plan ties no weight 'y'"),
        (put(Z, SyncTied("z", (0, 1))), "it must name all stages that hold 'z': (0, 2)"),
    ],
)
def test_a_broken_plan_is_refused(edit: Edit, words: str):
    broken = edited(PLAN, 0, edit)
    assert words in broken.check(profile="blocking").explain()
    assert not Judge(broken).good


def test_a_rank_that_holds_none_of_the_stages():
    broken = with_program(PLAN, 1, [SyncTied("embedding", (0, 2)), *PLAN.programs[1]])
    assert "rank 1 holds none of these stages" in broken.check().explain()
