"""Stages of as many blocks as the plan says, also of none: the engine equals one process."""

from typing import Any

import pytest
import torch

import quintsched as qs

from ..grid import Case, require_equality
from ..toys import ids_task, tiny_gpt, train_on

DEPTH = 4
LENGTH = 8

ZBV = (0, 0, 1, 1, 1, 0)
CASES: list[tuple[str, str, list[int], dict[str, Any]]] = [
    ("1f1b", "pp=4", [1, 2, 0, 2, 1, 0], {"where": (0, 0, 1, 2, 3, 3)}),
    ("gpipe", "pp=3", [1, 3, 2, 0], {"where": (0, 1, 1, 2)}),
    ("eager-1f1b", "pp=2", [1, 4, 1], {"where": (0, 0, 1)}),
    ("bfs", "pp=2", [1, 5, 0], {"where": (0, 1, 0)}),
    ("interleaved-1f1b", "pp=4", [1, 1, 1, 1, 0, 1, 1], {"where": (0, 1, 2, 3, 0, 1, 2)}),
    ("interleaved-1f1b", "pp=2,tp=2", [1, 2, 1, 2, 0], {"where": (0, 0, 1, 0, 1), "overlap": True}),
    ("interleaved-zb", "pp=2", [1, 5, 0], {"where": (0, 1, 0)}),
    ("zb-h1", "pp=3", [2, 0, 3, 1], {"where": (0, 1, 1, 2)}),
    ("zb-h2", "pp=2", [3, 3, 0], {"where": (0, 1, 1)}),
    ("zb-auto", "pp=2", [1, 2, 3], {"where": (0, 0, 1)}),
    ("zbv", "pp=2", [1, 1, 0, 2, 2, 0], {"where": ZBV, "model": "tied"}),
    ("v-half", "pp=2", [1, 2, 0, 2, 1], {"where": (0, 1, 1, 0, 0)}),
    ("v-min", "pp=2", [2, 4, 0], {"where": (0, 1, 0)}),
    ("dualpipe", "pp=2,tp=2", [1, 5, 0, 1, 5, 0], {"where": ZBV, "overlap": True}),
    ("dualpipe-v", "pp=2", [1, 1, 0, 2, 2, 0], {"where": ZBV, "overlap": True}),
    ("seq-1f1b", "pp=3", [3, 0, 3], {"slices": 2, "microbatches": 3}),
    ("zb-h1", "pp=3", [1, 3, 2], {"recompute": (1, 2, 2)}),
    ("zb-h1", "dp=2,pp=3", [5, 1, 0], {"zero": 3}),
    ("1f1b", "dp=2,pp=3", [4, 0, 2], {"zero": 2, "recompute": 1, "communication": "ring"}),
    ("zb-h1", "pp=3,tp=2", [4, 0, 2], {"sequence_parallel": True}),
    ("1f1b", "cp=2,pp=3", [5, 1, 0], {}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("schedule", "mesh", "stages", "more"), CASES)
def test_stages_of_any_number_of_blocks_equal_one_process(schedule, mesh, stages, more):
    told: dict[str, Any] = {"model": "gpt", "clip": 0.5, "depth": DEPTH} | more
    require_equality(Case(schedule, mesh, stages=tuple(stages), **told))


@pytest.mark.parametrize(
    ("schedule", "blocks", "words"),
    [
        ("1f1b", [3, 4], r"stages have 3,4 blocks, 7 of a model, but the model has 6; .* like --stages 3,3\b"),
        ("1f1b", [3, 2], r"stages have 3,2 blocks, 5 of a model, but the model has 6; "),
        ("dualpipe", [4, 3, 4, 3], r"4,3,4,3 blocks, 7 of a model, but the model has 6; .* like --stages 3,3,3,3\b"),
    ],
)
def test_blocks_that_are_not_those_of_the_model_are_refused(schedule: str, blocks: list[int], words: str) -> None:
    plan = qs.compile(schedule, mesh="pp=2", microbatches=4, stages=blocks)
    with pytest.raises(qs.MisfitError, match=words):
        train_on(plan, ids_task(1, 4, LENGTH), tiny_gpt(LENGTH, depth=DEPTH), dtype=torch.float64)
