"""Every route sees the model, once and in its order; twins are on different ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import SyncTied
from quintsched.ir.layout import Route
from quintsched.plan import Plan
from quintsched.verify.equivalence import run_and_compare

DUALPIPE = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
INFERENCE = qs.compile("inference", mesh="pp=2", microbatches=2)
PLAIN = qs.compile("1f1b", mesh="pp=2", microbatches=4)


def with_pieces(plan: Plan, pieces: tuple[int, ...]) -> Plan:
    """Return the plan with other pieces on its stages, and sums of gradients over those that are twins now."""
    changed = replace(plan, stage_to_part=pieces)
    programs = []
    for rank, program in enumerate(plan.programs):
        rest = [i for i in program if not isinstance(i, SyncTied)]
        at = next((k for k, i in enumerate(program) if isinstance(i, SyncTied)), 0)
        twins = sorted({changed.layout.twins(stage) for stage in plan.layout.stages_of(rank)} - {()})
        programs.append((*rest[:at], *(SyncTied("stage", stages) for stages in twins), *rest[at:]))
    return replace(changed, programs=tuple(programs))


WRONG = {
    "half of the microbatches see the model reversed": (
        with_pieces(DUALPIPE, (0, 1, 1, 0)),
        "route 1 visits the pieces of the model in the order [1, 0]",
    ),
    "all see it reversed": (with_pieces(PLAIN, (1, 0)), "route 0 visits the pieces of the model in the order [1, 0]"),
    "pieces that are not there": (with_pieces(PLAIN, (3, 9)), "must count the pieces of the model 0, 1, 2, … and"),
    "a piece below none": (with_pieces(PLAIN, (-1, 0)), "must count the pieces of the model 0, 1, 2, … and leave none"),
    "one piece twice": (with_pieces(PLAIN, (0, 0)), "route 0 visits the pieces of the model in the order [0, 0]"),
    "too few pieces": (replace(PLAIN, stage_to_part=(0,)), "stage_to_part names 1 stage, but there are 2"),
    "a forward of the reversed model": (with_pieces(INFERENCE, (1, 0)), "in the order [1, 0]; each route must visit"),
    "a route that leaves a piece out": (
        replace(PLAIN, routes=(Route((0, 1), (0, 1, 2)), Route((1,), (3,)))),
        "route 1 visits the pieces of the model in the order [1]; each route must visit all of them",
    ),
    "twins on one rank": (
        replace(DUALPIPE, stage_to_pp=(0, 1, 0, 1)),
        "stages 0 and 2 hold the same piece of the model, 0, both on pipeline rank 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_model_is_refused_in_words(name: str) -> None:
    plan, words = WRONG[name]
    verdict = plan.check()
    assert {finding.point for finding in verdict.findings} == {Point.WELL_FORMED}
    assert words in verdict.explain()


@pytest.mark.parametrize("plan", [DUALPIPE, qs.compile("dualpipe", mesh="pp=4", microbatches=8)], ids=lambda p: p.title)
def test_twins_and_pieces_that_are_named_are_fine(plan: Plan) -> None:
    assert plan.check(profile="blocking").sound
    assert with_pieces(plan, plan.stage_to_part or ()).programs == plan.programs
    assert replace(PLAIN, stage_to_part=(0, 1)).check().sound


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (with_pieces(DUALPIPE, (0, 1, 1, 0)), "stage 2 computes another gradient for microbatch 2"),
        (with_pieces(PLAIN, (1, 0)), "stage 0 computes another gradient for microbatch 0"),
        (with_pieces(INFERENCE, (1, 0)), "rank 0 ends with another loss"),
    ],
    ids=["half", "all", "forward"],
)
def test_the_algebra_alone_sees_another_model(plan: Plan, words: str) -> None:
    assert words in run_and_compare(plan).explain()
