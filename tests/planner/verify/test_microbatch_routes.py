"""Every route sees the model, once and in its order; twins are on different ranks."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.ir.diagnostics import Point
from quintsched.ir.layout import Route
from quintsched.verify.equivalence import run_and_compare
from tests.planner.verify.small_plans import with_pieces

DUALPIPE = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
INFERENCE = qs.compile("inference", mesh="pp=2", microbatches=2)
PLAIN = qs.compile("1f1b", mesh="pp=2", microbatches=4)


ONE = "route 1 visits the pieces of the model in the order [1]; each route must visit all of them"
TWINS = "stages 0 and 2 hold the same piece of the model, 0, both on pipeline rank 0"
WRONG: list[tuple[qs.Plan, str, str]] = [
    (with_pieces(DUALPIPE, (0, 1, 1, 0)), "in the order [1, 0]", "stage 2 computes another gradient for microbatch 2"),
    (with_pieces(PLAIN, (1, 0)), "route 0 visits the pieces of the model in", "stage 0 computes another gradient for"),
    (with_pieces(INFERENCE, (1, 0)), "in the order [1, 0]; each route must visit", "rank 0 ends with another loss"),
    (with_pieces(PLAIN, (3, 9)), "must count the pieces of the model 0, 1, 2, … and", ""),
    (with_pieces(PLAIN, (-1, 0)), "must count the pieces of the model 0, 1, 2, … and leave none", ""),
    (with_pieces(PLAIN, (0, 0)), "route 0 visits the pieces of the model in the order [0, 0]", ""),
    (replace(PLAIN, stage_to_part=(0,)), "stage_to_part names 1 stage, but there are 2", ""),
    (replace(PLAIN, routes=(Route((0, 1), (0, 1, 2)), Route((1,), (3,)))), ONE, ""),
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
    assert replace(PLAIN, stage_to_part=(0, 1)).check().sound
