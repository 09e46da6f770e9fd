"""Plans as algebra: the sequential program's gradient; not that of faulty plans or of routes through another model."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import (
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    BwdWeight,
    ClipGrad,
    FreeParams,
    Fwd,
    GatherParams,
    OptStep,
    RecvAct,
    RecvSkipGrad,
    ReduceScatterBucket,
    SendAct,
    SendSkip,
    SendSkipGrad,
    ShareMetrics,
)
from quintsched.ir.layout import Route
from quintsched.verify.algebraic_training_model import PRIME, AlgebraicModel, Sequential, Weights
from quintsched.verify.equivalence import equivalence, run_and_compare
from tests.planner.verify.edits import Edit, double, drop, edited, move, put, swap
from tests.planner.verify.small_plans import with_pieces


def test_the_gradients_are_those_of_the_loss():
    """With three slices the loss is of degree 2 in each single weight: a symmetric difference quotient is exact."""
    plan = qs.compile("seq-1f1b", mesh="dp=2,pp=3", microbatches=2, slices=3)
    for stage in range(3):
        gradient = Sequential(plan, AlgebraicModel(plan)).gradient(stage)
        for k, name in enumerate(Weights._fields):
            losses = []
            for step in (1, -1):
                moved = AlgebraicModel(plan)
                weights = moved.weights[stage]
                moved.weights[stage] = weights._replace(**{name: weights[k] + step})
                losses.append(int(Sequential(plan, moved).total_loss[0]))
            assert (losses[0] - losses[1]) % PRIME == 2 * int(gradient[k][0]) % PRIME, (stage, name)


PLAIN = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4)
SPLIT = qs.compile("zb-h1", mesh="dp=2,pp=2", microbatches=4)
ALONE = qs.compile("1f1b", mesh="dp=2,pp=1", microbatches=3)
EXPERTS = qs.compile("1f1b", mesh="dp=2,ep=2,pp=2", microbatches=2)
SKIPS = qs.compile("1f1b", mesh="pp=3", microbatches=3, skip={"h": (0, 1, 2), "k": (0, 2)}, losses=(1, 2))
TWO_SKIPS = qs.compile("gpipe", mesh="pp=2", microbatches=2, skip={"h": (0, 1), "k": (0, 1)})
ZERO_1, ZERO_3 = (qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=zero) for zero in (1, 3))
FEW = qs.compile("gpipe", mesh="pp=2", microbatches=2)
SLICED = qs.compile("seq-1f1b", mesh="pp=1", microbatches=1, slices=2)
OF_EXPERTS = AllReduceBucket(1, 1, ("dp",))
CROSSING = [swap(SendAct(0, 0, 1), SendAct(0, 1, 1)), move(Fwd(0, 1), after=Fwd(0, 0))]

LOST = [
    "stage 0 adds up the gradient of microbatch 1 0 times instead of once",
    "the optimizer steps stage 0 with another gradient than the sequential program's",
    "the saved activations of stage 0, microbatch 1 is left over on rank 0",
]

ANOTHER = "the optimizer steps stage 1 with another gradient"

FAULTS: list[tuple[qs.Plan, int, list[Edit], list[str]]] = [
    (PLAIN, 1, [put(Bwd(1, 2), Bwd(1, 1))], ["Bwd(stage=1, microbatch=1): needs the saved activations of stage 1, mi"]),
    (SPLIT, 1, [put(BwdWeight(1, 2), BwdWeight(1, 1))], ["needs the pending weight half of stage 1, microbatch"]),
    (ALONE, 0, [drop(Bwd(0, 1))], LOST),
    (PLAIN, 1, [drop(AllReduceBucket)], [ANOTHER]),
    (EXPERTS, 1, [put(OF_EXPERTS, replace(OF_EXPERTS, axes=("dp", "ep")))], ["the axes must be those of the replicas"]),
    (EXPERTS, 1, [drop(OF_EXPERTS)], [ANOTHER]),
    (PLAIN, 1, [move(AllReduceBucket, before=Bwd(1, 3))], [ANOTHER]),
    (PLAIN, 1, [move(AllReduceBucket, after=ClipGrad)], ["uses another gradient of stage 1 than the one in the norm"]),
    (FEW, 0, CROSSING, ["stage 0 computes another gradient for microbatch 0 than", "rank 0 ends with another loss"]),
    (PLAIN, 1, [put(RecvAct(1, 0, 0), RecvAct(1, 1, 0))], ["needs the output of stage 0, microbatch 0"]),
    (PLAIN, 0, [double(SendAct)], ["needs the output of stage 0, microbatch 0, which is not on rank 0"]),
    (PLAIN, 0, [drop(SendAct)], ["rank 1 waits for ever at instruction"]),
    (PLAIN, 0, [move(OptStep, before=ShareMetrics)], ["OptStep(stages=0): needs the metrics"]),
    (PLAIN, 0, [drop(OptStep)], ["stage 0 never gets its optimizer step"]),
    (SKIPS, 0, [put(SendSkip(0, 0, 2, "h"), SendSkip(0, 0, 2, "k"))], ["needs the skip 1 at stage 2, microbatch 0"]),
    (SKIPS, 2, [double(SendSkipGrad(2, 1, 1, "h"))], ["needs the gradient of skip 0 at stage 2, microbatch 1"]),
    (TWO_SKIPS, 0, [swap(RecvSkipGrad(0, 0, 1, "h"), RecvSkipGrad(0, 0, 1, "k"))], ["stage 0 computes another gradie"]),
    (SLICED, 0, [swap(Fwd(0, 0), Fwd(0, 1))], ["needs the keys and values of stage 0, microbatch 0"]),
    (SLICED, 0, [swap(Bwd(0, 0), Bwd(0, 1))], ["needs the gradient of the keys and values of stage 0, microbatch 0"]),
    (PLAIN, 0, [put(Fwd, Fwd(7, 0))], ["stage 7 is out of range"]),
    (ZERO_1, 0, [double(ReduceScatterBucket)], ["finds no gradient of stage 0"]),
    (ZERO_1, 1, [drop(AllGatherBucket)], [ANOTHER]),
    (ZERO_3, 0, [drop(GatherParams)], ["needs the full weights of stage 0, gathering 0"]),
    (ZERO_3, 0, [drop(FreeParams)], ["the full weights of stage 0, gathering 0 is left over on rank 0"]),
]


@pytest.mark.parametrize(("plan", "rank", "edits", "words"), FAULTS, ids=[words[0] for *_, words in FAULTS])
def test_a_fault_is_said_in_words_and_refused_by_the_checker(plan, rank, edits, words):
    broken = edited(plan, rank, *edits)
    found = equivalence(broken)
    assert equivalence(plan).holds
    assert not found.holds
    assert not broken.check(profile="tagged").sound
    assert found.explain().startswith("not equivalent to the sequential program")
    assert all(word in found.explain() for word in words)


DUALPIPE = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
INFERENCE = qs.compile("inference", mesh="pp=2", microbatches=2)
ALONE_IN_PIPELINES = qs.compile("1f1b", mesh="pp=2", microbatches=4)
ONE = "route 1 visits the pieces of the model in the order [1]; each route must visit all of them"
TWINS = "stages 0 and 2 hold the same piece of the model, 0, both on pipeline rank 0"

WRONG: list[tuple[qs.Plan, str, str]] = [
    (with_pieces(DUALPIPE, (0, 1, 1, 0)), "in the order [1, 0]", "stage 2 computes another gradient for microbatch 2"),
    (
        with_pieces(ALONE_IN_PIPELINES, (1, 0)),
        "route 0 visits the pieces of the model in",
        "stage 0 computes another gradient for",
    ),
    (with_pieces(INFERENCE, (1, 0)), "in the order [1, 0]; each route must visit", "rank 0 ends with another loss"),
    (with_pieces(ALONE_IN_PIPELINES, (3, 9)), "must count the pieces of the model 0, 1, 2, … and", ""),
    (with_pieces(ALONE_IN_PIPELINES, (-1, 0)), "must count the pieces of the model 0, 1, 2, … and leave none", ""),
    (with_pieces(ALONE_IN_PIPELINES, (0, 0)), "route 0 visits the pieces of the model in the order [0, 0]", ""),
    (replace(ALONE_IN_PIPELINES, stage_to_part=(0,)), "stage_to_part names 1 stage, but there are 2", ""),
    (replace(ALONE_IN_PIPELINES, routes=(Route((0, 1), (0, 1, 2)), Route((1,), (3,)))), ONE, ""),
    (replace(DUALPIPE, stage_to_pp=(0, 1, 0, 1)), TWINS, ""),
]


@pytest.mark.parametrize(("plan", "words", "algebra"), WRONG, ids=[words for _, words, _ in WRONG])
def test_another_model_is_refused_in_words(plan: qs.Plan, words: str, algebra: str) -> None:
    """By the checker; where the plan can be run, by the algebra alone as well."""
    verdict = plan.check()
    assert {finding.point for finding in verdict.findings} == {Point.WELL_FORMED}
    assert words in verdict.explain()
    assert not algebra or algebra in run_and_compare(plan).explain()


def test_twins_and_pieces_that_are_named_are_fine() -> None:
    assert with_pieces(DUALPIPE, DUALPIPE.stage_to_part or ()).programs == DUALPIPE.programs
    assert replace(ALONE_IN_PIPELINES, stage_to_part=(0, 1)).check().sound
