"""Plans as algebra: every schedule computes the sequential program's gradient, and faulty plans do not."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir import placement
from quintsched.ir.instruction_set import (
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    Compute,
    Fwd,
    Instruction,
    OptStep,
    RecvAct,
    RecvSkipGrad,
    SendAct,
    SendSkip,
    SendSkipGrad,
    ShareMetrics,
    SyncTied,
)
from quintsched.plan import Plan
from quintsched.schedules import Order, Schedule, Shape
from quintsched.verify.algebra import PRIME, Model, Saved, Sequential, Weights, backward, forward
from quintsched.verify.equivalence import equivalence
from tests.planner.verify.mutants import any_mutant, with_program
from tests.planner.verify.small_plans import EACH, Recipe, any_plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", EACH, ids=str)
def test_every_schedule_is_equivalent(recipe: Recipe):
    plan = recipe.plan
    assert equivalence(plan).holds, equivalence(plan).explain()
    assert "computes the gradient of the sequential program" in equivalence(plan, seed=7).explain()


def _twins(rank: int, shape: Shape) -> Order:
    """Two routes, one down the ranks and one up, as a bidirectional schedule has them."""
    for stage in shape.stages_of(rank):
        units = range(shape.microbatches // 2)
        for unit in units if stage < shape.pp else (len(units) + u for u in units):
            yield Fwd(stage, unit)
    for stage in shape.stages_of(rank):
        units = range(shape.microbatches // 2)
        for unit in units if stage < shape.pp else (len(units) + u for u in units):
            yield BwdInput(stage, unit)
            yield BwdWeight(stage, unit)


TWINS = Schedule("twins", _twins, "", "", "", placement=placement.bidirectional, bidirectional=True)


def _slices(rank: int, shape: Shape) -> Order:
    for microbatch in range(shape.microbatches):
        units = range(microbatch * shape.slices, (microbatch + 1) * shape.slices)
        yield from (Fwd(rank, unit) for unit in units)
        yield from (Bwd(rank, unit) for unit in reversed(units))


SLICES = Schedule("slices", _slices, "", "", "", max_slices=4)


def test_twins_and_slices_are_equivalent():
    twins = qs.compile(TWINS, mesh="dp=2,pp=4", microbatches=4, buckets_per_stage=2)
    assert any(isinstance(i, SyncTied) for i in twins.programs[0])
    assert equivalence(twins).holds, equivalence(twins).explain()
    slices = qs.compile(SLICES, mesh="pp=3", microbatches=2, slices=3)
    assert equivalence(slices).holds, equivalence(slices).explain()


def test_the_gradients_are_those_of_the_loss():
    """With three slices the loss is of degree 2 in each single weight: a symmetric difference quotient is exact."""
    plan = qs.compile(SLICES, mesh="dp=2,pp=3", microbatches=2, slices=3)
    for stage in range(3):
        gradient = Sequential(plan, Model(plan)).gradient(stage)
        for k, name in enumerate(Weights._fields):
            losses = []
            for step in (1, -1):
                moved = Model(plan)
                weights = moved.weights[stage]
                moved.weights[stage] = weights._replace(**{name: weights[k] + step})
                losses.append(int(Sequential(plan, moved).total_loss[0]))
            assert (losses[0] - losses[1]) % PRIME == 2 * int(gradient[k][0]) % PRIME, (stage, name)


def test_the_backward_undoes_nothing_and_sees_everything():
    weights = Weights(2, 3, 5, 7, 11)
    number = Model(qs.compile("1f1b", mesh="pp=1", microbatches=1)).zero
    saved = Saved(number + 13, number + 17)
    y, k = forward(weights, saved)
    assert (int(y[0]), int(k[0])) == (2 * 13 + 3 + 5 * 17, 7 * 17 + 11 * 13)
    of_x, of_k, of_weights = backward(weights, saved, number + 1, number + 100)
    assert (int(of_x[0]), int(of_k[0])) == (2 + 1100, 5 + 700)
    assert [int(part[0]) for part in of_weights] == [13, 1, 17, 1700, 1300]


def changed(plan: Plan, rank: int, change) -> str:
    """Return what the symbolic run says of a plan with one program changed; the checker has to refuse it too."""
    program = list(plan.programs[rank])
    change(program)
    broken = with_program(plan, rank, program)
    assert not broken.check(profile="tagged").sound
    found = equivalence(broken)
    assert not found.holds
    assert found.explain().startswith("not equivalent to the sequential program")
    return found.explain()


def index_of(program: list[Instruction], *wanted: object) -> int:
    return next(k for k, i in enumerate(program) if i in wanted or type(i) in wanted)


PLAIN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4)
SPLIT = qs.compile("zb-h1", mesh="dp=2,pp=2", microbatches=4)


def test_a_microbatch_backward_twice_and_another_never():
    def change(program):
        program[index_of(program, Bwd(1, 2))] = Bwd(1, 1)

    assert "Bwd(stage=1, microbatch=1): needs the saved activations of stage 1, microbatch 1" in changed(
        PLAIN, 1, change
    )


def test_a_weight_half_twice_and_another_never():
    def change(program):
        program[index_of(program, BwdWeight(1, 2))] = BwdWeight(1, 1)

    assert "needs the pending weight half of stage 1, microbatch" in changed(SPLIT, 1, change)


def test_a_backward_that_is_left_out_is_missing_in_the_sum():
    plan = qs.compile("1f1b", mesh="dp=2,pp=1", microbatches=3)

    def change(program):
        del program[index_of(program, Bwd(0, 1))]

    words = changed(plan, 0, change)
    assert "stage 0 adds up the gradient of microbatch 1 0 times instead of once" in words
    assert "the optimizer steps stage 0 with another gradient than the sequential program's" in words
    assert "the saved activations of stage 0, microbatch 1 is left over on rank 0" in words


def test_weights_before_inputs():
    def change(program):
        k = index_of(program, BwdInput(1, 0))
        at = index_of(program, BwdWeight(1, 0))
        program[k], program[at] = program[at], program[k]

    assert "BwdWeight(stage=1, microbatch=0): needs the pending weight half of stage 1, microbatch 0" in changed(
        SPLIT, 1, change
    )


def test_a_missing_reduction():
    def change(program):
        del program[index_of(program, AllReduceBucket)]

    assert "the optimizer steps stage 1 with another gradient" in changed(PLAIN, 1, change)


def test_experts_summed_over_the_dense_weights_axes():
    plan = qs.compile("1f1b", mesh="dp=2,ep=2,pp=2", microbatches=2)
    experts = AllReduceBucket(1, 1, ("dp",))

    def dense(program):
        program[index_of(program, experts)] = replace(experts, axes=("dp", "ep"))

    def never(program):
        del program[index_of(program, experts)]

    assert equivalence(plan).holds
    assert "the axes must be those of the replicas, ('dp',)" in changed(plan, 1, dense)
    assert "the optimizer steps stage 1 with another gradient" in changed(plan, 1, never)


def test_an_early_reduction():
    def change(program):
        program.insert(index_of(program, Bwd(1, 3)), program.pop(index_of(program, AllReduceBucket)))

    assert "the optimizer steps stage 1 with another gradient" in changed(PLAIN, 1, change)


def test_a_reduction_after_the_norm():
    def change(program):
        at = index_of(program, ClipGrad)
        program.insert(at, program.pop(index_of(program, AllReduceBucket)))

    assert "OptStep(stages=1): uses another gradient of stage 1 than the one in the norm" in changed(PLAIN, 1, change)


def test_a_missing_sum_over_twins():
    plan = qs.compile(TWINS, mesh="pp=2", microbatches=4)
    without = replace(plan, programs=tuple(tuple(i for i in p if not isinstance(i, SyncTied)) for p in plan.programs))
    assert not without.check().sound
    assert "the optimizer steps stage 0 with another gradient" in equivalence(without).explain()


def test_crossing_sends():
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=2)

    def change(program):
        first, second = (k for k, i in enumerate(program) if isinstance(i, SendAct))
        program[first], program[second] = program[second], program[first]
        program.insert(1, program.pop(2))  # both forwards first

    words = changed(plan, 0, change)
    assert "stage 0 computes another gradient for microbatch 0 than the sequential program" in words
    assert "rank 0 ends with another loss" in words


def test_receives_in_another_order():
    def change(program):
        program[index_of(program, RecvAct(1, 0, 0))] = RecvAct(1, 1, 0)

    assert "needs the output of stage 0, microbatch 0" in changed(PLAIN, 1, change)


def test_a_send_too_many_and_one_too_few():
    def twice(program):
        at = index_of(program, SendAct)
        program.insert(at, program[at])

    def never(program):
        del program[index_of(program, SendAct)]

    assert "needs the output of stage 0, microbatch 0, which is not on rank 0" in changed(PLAIN, 0, twice)
    assert "rank 1 waits for ever at instruction" in changed(PLAIN, 0, never)


def test_a_step_before_the_metrics_and_no_step():
    def early(program):
        program.insert(index_of(program, ShareMetrics), program.pop(index_of(program, OptStep)))

    def none(program):
        del program[index_of(program, OptStep)]

    assert "OptStep(stages=0): needs the metrics" in changed(PLAIN, 0, early)
    assert "stage 0 never gets its optimizer step" in changed(PLAIN, 0, none)


SKIPS = qs.compile("1f1b", mesh="pp=3", microbatches=3, skip={"h": (0, 1, 2), "k": (0, 2)}, losses=(1, 2))


def test_a_skip_of_another_name_or_microbatch():
    def renamed(program):
        program[index_of(program, SendSkip(0, 0, 2, "h"))] = SendSkip(0, 0, 2, "k")

    def late(program):
        first, second = index_of(program, SendSkip(0, 0, 1, "h")), index_of(program, SendSkip(0, 1, 1, "h"))
        program[first], program[second] = program[second], program[first]

    assert equivalence(SKIPS).holds
    assert "needs the skip 1 at stage 2, microbatch 0" in changed(SKIPS, 0, renamed)
    assert "needs the skip 0 at stage 1, microbatch 1" in changed(SKIPS, 0, late)


def test_the_gradient_of_a_skip_twice_or_never():
    def never(program):
        del program[index_of(program, SendSkipGrad(2, 1, 1, "h"))]

    def twice(program):
        at = index_of(program, SendSkipGrad(2, 1, 1, "h"))
        program.insert(at, program[at])

    def another(program):
        program[index_of(program, RecvSkipGrad(1, 1, 2, "h"))] = RecvSkipGrad(1, 2, 2, "h")

    assert "waits for ever at" in changed(SKIPS, 2, never)
    assert "needs the gradient of skip 0 at stage 2, microbatch 1" in changed(SKIPS, 2, twice)
    assert "needs the gradient of skip 0 at stage 2, microbatch 1" in changed(SKIPS, 1, another)


def test_gradients_of_skips_that_change_places_are_other_gradients():
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=2, skip={"h": (0, 1), "k": (0, 1)})

    def change(program):
        first, second = index_of(program, RecvSkipGrad(0, 0, 1, "h")), index_of(program, RecvSkipGrad(0, 0, 1, "k"))
        program[first], program[second] = program[second], program[first]

    assert "stage 0 computes another gradient for microbatch 0" in changed(plan, 0, change)


def test_slices_out_of_order():
    plan = qs.compile(SLICES, mesh="pp=1", microbatches=1, slices=2)

    def forwards(program):
        program[:2] = program[1::-1]

    def backwards(program):
        program[2:4] = program[3:1:-1]

    assert "needs the keys and values of stage 0, microbatch 0" in changed(plan, 0, forwards)
    assert "needs the gradient of the keys and values of stage 0, microbatch 0" in changed(plan, 0, backwards)


def test_a_malformed_plan_is_not_run():
    def change(program):
        program[index_of(program, Fwd)] = Fwd(7, 0)

    assert "stage 7 is out of range" in changed(PLAIN, 0, change)
    assert not equivalence(replace(PLAIN, programs=PLAIN.programs[:1])).holds


@given(recipe=st.sampled_from(EACH), random=st.randoms(use_true_random=False))
def test_what_is_sound_is_equivalent(recipe, random):
    assert_sound_is_equivalent(any_mutant(recipe.plan, random))


def assert_sound_is_equivalent(plan: Plan) -> bool:
    holds = equivalence(plan).holds
    assert holds or not plan.check(profile="blocking").sound, equivalence(plan).explain()
    return holds


def test_a_renumbered_computation_never_gives_the_same_gradient():
    """Unsound plans need not be inequivalent; but with another microbatch or stage they are."""
    random = Random(0)
    training = [recipe for recipe in EACH if recipe.schedule.mode == "train"]
    several = [recipe for recipe in training if recipe.options["microbatches"] * recipe.options.get("slices", 1) > 1]
    for _ in range(200):
        plan = any_plan(several, random)
        rank = random.randrange(len(plan.programs))
        program = list(plan.programs[rank])
        index = random.choice([k for k, i in enumerate(program) if isinstance(i, Compute)])
        i = program[index]
        others = [unit for unit in plan.layout.microbatches_of(i.stage) if unit != i.microbatch]
        program[index] = replace(i, microbatch=random.choice(others))
        assert not assert_sound_is_equivalent(with_program(plan, rank, program))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_what_is_sound_is_equivalent_on_many_mutants(seed):
    random = Random(seed)
    for _ in range(1000):
        assert_sound_is_equivalent(any_mutant(any_plan(EACH, random), random))
