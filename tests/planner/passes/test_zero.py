"""ZeRO: every schedule shares out its state soundly, and plans that do it wrongly are refused."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.graph.transport_profiles import PROFILES
from quintsched.ir.instruction_set import (
    ENDS_BACKWARD,
    NEEDS_WEIGHTS,
    AllGatherBucket,
    Bwd,
    Compute,
    FreeParams,
    GatherParams,
    Instruction,
    Message,
    ReduceScatterBucket,
)
from quintsched.ir.zero_sharding import Zero
from quintsched.plan import Plan
from quintsched.testing import assert_plan_sound
from quintsched.verify.equivalence import equivalence
from tests.planner.passes.shapes import TRAINING, cells, takes
from tests.planner.verify.edits import edited, move
from tests.planner.verify.judge import Judge
from tests.planner.verify.mutants import with_program

MESHES = {
    "dp=2": {"dp": 2},
    "cp=3": {"cp": 3},
    "dp=2,ep=2": {"dp": 2, "ep": 2},
    "dp=4,tp=2": {"dp": 4},
    "ep=2": {"ep": 2},
}


def compiled(schedule: qs.Schedule, data: st.DataObject, **more: object) -> Plan:
    """A plan of a schedule at a small shape that it takes."""
    pp = data.draw(st.sampled_from([1, 2, 3, 4]))
    mesh = f"{data.draw(st.sampled_from([*MESHES]))},pp={pp}"
    for shape in ((mesh, data.draw(st.integers(1, 6))), (mesh, 2 * pp), (f"{mesh[:-1]}2", 4)):
        if takes(schedule, {"mesh": shape[0], "microbatches": shape[1]}):
            return qs.compile(schedule, mesh=shape[0], microbatches=shape[1], **more)
    raise AssertionError(f"{schedule.name} takes none of these shapes")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@settings(max_examples=25)
@given(data=st.data(), zero=st.integers(1, 3), every=st.integers(1, 4), buckets=st.integers(1, 2))
def test_every_schedule_is_sound(schedule, data, zero, every, buckets):
    every = every if zero > 1 else 1
    more = {"recompute": data.draw(st.integers(0, 1)), "buckets_per_stage": buckets}
    plan = compiled(schedule, data, zero=zero, zero_every=every, **more)
    assert_plan_sound(plan)
    assert Judge(plan).good
    assert plan.check(profile="blocking").profiles == dict.fromkeys(PROFILES, True)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert json.loads(text)["zero"] == {"stage": zero, "every": every}
    plain = qs.compile(schedule, mesh=plan.mesh, microbatches=plan.schedule.microbatches, **more)
    for rank, program in enumerate(plan.programs):
        kept = Compute | Message
        assert [i for i in program if isinstance(i, kept)] == [i for i in plain.programs[rank] if isinstance(i, kept)]
        assert_reduced_in_time(program, plan, rank)
        assert_gathered(program, zero)


def assert_reduced_in_time(program: tuple[Instruction, ...], plan: Plan, rank: int) -> None:
    """Each bucket sums every gradient once, and none waits for more than `every` others."""
    reductions = plan.layout.reductions
    for stage in plan.layout.stages_of(rank):
        most = plan.zero.every if plan.zero.stage > 1 and not plan.layout.ties_of(stage) else len(program)
        for bucket, axes in reductions:
            waiting, total, parts = 0, 0, []
            for i in program:
                if isinstance(i, ENDS_BACKWARD) and i.stage == stage:
                    waiting, total = waiting + 1, total + 1
                    assert waiting <= most
                elif isinstance(i, ReduceScatterBucket) and (i.stage, i.bucket) == (stage, bucket):
                    assert waiting, "there is something to reduce"
                    assert i.axes == axes
                    parts.append(i.part)
                    waiting = 0
            assert not waiting
            assert total == len(plan.layout.microbatches_of(stage))
            assert parts == [*range(len(parts))]
            assert len(parts) == -(-total // most)


def assert_gathered(program: tuple[Instruction, ...], zero: int) -> None:
    """Full weights stand where they are used, of two stages at most, and none at the end."""
    gathers = [i for i in program if isinstance(i, AllGatherBucket)]
    assert bool(gathers) == (zero < 3)
    standing: set[int] = set()
    for i in program:
        if isinstance(i, GatherParams):
            assert i.stage not in standing
            standing.add(i.stage)
        elif isinstance(i, FreeParams):
            standing.remove(i.stage)
        elif isinstance(i, NEEDS_WEIGHTS) and zero == 3:
            assert i.stage in standing
        assert len(standing) <= (2 if zero == 3 else 0)
    assert not standing
    uses = [i.stage for i in program if isinstance(i, NEEDS_WEIGHTS)]
    runs = 1 + sum(a != b for a, b in pairwise(uses))
    assert sum(isinstance(i, GatherParams) for i in program) == (runs if zero == 3 else 0)


def test_the_next_weights_are_gathered_one_computation_ahead():
    chunks = qs.compile("interleaved-1f1b", mesh="dp=2,pp=1", microbatches=2, chunks=2, zero=3)
    assert cells(chunks, 0) == (
        "0GP 1GP 0F0 0FP 1F0 0GP 1B0 1FP 1RS0 0F1 1GP 0B0 0FP 0RS0 1F1 0GP 1B1 1FP 1RS0 0B1 0FP 0RS0 metrics clip step"
    )
    halves = qs.compile("zbv", mesh="dp=2,pp=2", microbatches=4, zero=3)
    assert "3F1 3I1 3FP 0GP 3W1 3RS0 0F3" in cells(halves, 0), "a weight half needs no weights, and hides a gathering"


def test_zero_2_reduces_after_every_few():
    plan = qs.compile("gpipe", mesh="dp=2,pp=1", microbatches=5, zero=2, zero_every=2)
    assert cells(plan, 0) == "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0RS0 0B2 0B3 0RS0 0B4 0RS0 metrics clip step 0AG0"
    assert [i.part for i in plan.programs[0] if isinstance(i, ReduceScatterBucket)] == [0, 1, 2]


def test_tied_gradients_are_reduced_once_they_are_added_up():
    plan = qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=3, zero=3, tied={"embedding": (0, 2)})
    parts = [sum(isinstance(i, ReduceScatterBucket) for i in program) for program in plan.programs]
    assert parts == [1, 3, 1]
    assert cells(plan, 0).endswith("0B2 0FP tied 0RS0 metrics clip step")
    assert_plan_sound(plan)
    assert_plan_sound(qs.compile("dualpipe", mesh="dp=2,pp=2", microbatches=8, zero=2))


def test_weights_are_gathered_for_inference_too():
    plan = qs.compile("inference", mesh="dp=2,pp=2", microbatches=2, zero=3)
    assert cells(plan, 0) == "0GP 0F0 0F1 0FP metrics"
    assert_plan_sound(plan)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_size_of_a_plan_does_not_depend_on_the_number_of_replicas(zero):
    few, many = (qs.compile("zb-h1", mesh=f"dp={dp},pp=4", microbatches=8, zero=zero).to_json() for dp in (2, 1024))
    assert many == few.replace('["dp", 2]', '["dp", 1024]')


PLANS = [
    qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=4, chunks=2, zero=zero, zero_every=every)
    for zero, every in ((1, 1), (2, 1), (2, 3), (3, 1), (3, 2))
] + [qs.compile("zb-h1", mesh="dp=2,ep=2,pp=2", microbatches=3, zero=zero, recompute=1) for zero in (1, 2, 3)]
SHARING = (ReduceScatterBucket, AllGatherBucket, GatherParams, FreeParams)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.title}, every {plan.zero.every}")
def test_whatever_is_dropped_or_doubled_is_found(plan):
    """By the proof; and by the symbolic run, but for a reduction that the next one makes up for."""
    for rank, program in enumerate(plan.programs):
        for index, i in enumerate(program):
            if isinstance(i, SHARING):
                fewer, more = [*program[:index], *program[index + 1 :]], [*program[: index + 1], *program[index:]]
                last = not isinstance(i, ReduceScatterBucket) or replace(i, part=i.part + 1) not in program
                for changed in (fewer, more):
                    broken = with_program(plan, rank, changed)
                    assert not broken.check(profile="tagged").sound, i
                    assert equivalence(broken).holds == (changed is fewer and not last), i


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.title}, every {plan.zero.every}")
def test_whatever_is_moved_past_its_use_is_found(plan):
    """Gathers behind the computation they are for, drops before it, scatters before theirs or behind the next one."""
    program = plan.programs[0]
    for index, i in enumerate(program):
        rest = [*program[:index], *program[index + 1 :]]
        for other in moved_to(i, index, program):
            rest.insert(other, i)
            broken = with_program(plan, 0, rest)
            assert not broken.check(profile="tagged").sound, (i, other)
            assert not Judge(broken).good
            rest.pop(other)


def moved_to(i: Instruction, index: int, program: tuple[Instruction, ...]) -> list[int]:
    """Places, in the program without the instruction, where it may not stand."""
    same = [place for place, other in enumerate(program) if getattr(other, "stage", None) == getattr(i, "stage", -1)]
    if isinstance(i, GatherParams):
        return [next(place for place in same if place > index and isinstance(program[place], NEEDS_WEIGHTS))]
    if isinstance(i, FreeParams):
        return [max(place for place in same if place < index and isinstance(program[place], NEEDS_WEIGHTS))]
    if isinstance(i, ReduceScatterBucket):
        ends = [place for place in same if isinstance(program[place], ENDS_BACKWARD)]
        later = [place for place in ends if place > index][:1]
        return [max(place for place in ends if place < index), *later]
    return [0] if isinstance(i, AllGatherBucket) else []


ZERO_3 = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=3)
ZERO_2 = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=2)


def without(plan: Plan, *kinds: type[Instruction]) -> Plan:
    return replace(plan, programs=tuple(tuple(i for i in p if not isinstance(i, kinds)) for p in plan.programs))


def test_a_plan_without_gathers_is_no_zero_3():
    broken = without(ZERO_3, GatherParams, FreeParams)
    text = broken.to_json()
    verdict = Plan.from_json(text).check()
    assert not verdict.sound
    assert "needs the full weights of stage 0, gathering 0, which nothing on its rank makes" in verdict.explain()


@pytest.mark.parametrize(
    ("plan", "change", "words"),
    [
        (ZERO_2, {"axes": ("ep",)}, "the axes must be those of the replicas, ('dp',)"),
        (ZERO_2, {"axes": ()}, "the axes must be those of the replicas"),
        (ZERO_2, {"bucket": 1}, "bucket 1 is out of range: a stage has 1"),
        (ZERO_2, {"part": 2}, "part 2 is out of range: the gradients of the stage have 2"),
        (ZERO_2, {"stage": 1}, "stage 1 is on rank 1, not on rank 0"),
    ],
)
def test_a_bucket_that_does_not_fit(plan, change, words):
    program = [replace(i, **change) if isinstance(i, ReduceScatterBucket) else i for i in plan.programs[0]]
    assert words in with_program(plan, 0, program).check().explain()


def test_each_stage_of_zero_has_instructions_of_its_own():
    assert "where replicas share out nothing" in replace(ZERO_2, zero=Zero()).check().explain()
    assert "where replicas share out optimizer state, gradients" in replace(ZERO_3, zero=Zero(2)).check().explain()
    plain = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    assert "AllReduceBucket(stage=0, bucket=0, axes=dp): it has no place in a plan of ZeRO stage 1" in (
        replace(plain, zero=Zero(1)).check().explain()
    )


def test_a_share_that_is_not_gathered_again():
    broken = without(ZERO_2, AllGatherBucket)
    assert "makes the stepped shards of stage 0, bucket 0, and nothing on rank 0 takes it" in broken.check().explain()
    assert "the optimizer steps stage 0 with another gradient" in equivalence(broken).explain()


def test_gradients_may_not_pile_up():
    explained = edited(ZERO_2, 0, move(ReduceScatterBucket, after=Bwd(0, 1))).check().explain()
    assert "Bwd(stage=0, microbatch=1) needs the reduced gradient of stage 0, bucket 0, made only later" in explained


def test_a_plain_plan_file_does_not_speak_of_it():
    plain = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    head = json.loads(plain.to_json())
    assert "zero" not in head
    assert Plan.from_json(json.dumps(head | {"zero": {"stage": 0, "every": 1}})) == plain
    assert ZERO_2.title == f"{plain.title}, ZeRO-2"
