"""Another shape in every step: losses, weights and metrics are those of one process, on every schedule and mesh."""

from __future__ import annotations

from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.comm import Rules

from .changing import Shape, require_equal, small_gpt, train_alone, train_on

ONE = [
    Shape([(4, 8)]),
    Shape([(5, 16)]),
    Shape([(2, 4)]),
    Shape([(7, 8)], evaluates=True),
    Shape([(1, 12)]),
    Shape([(4, 8)]),
    Shape([(3, 8)], evaluates=True),
]
TWO = [
    Shape([(4, 8), (4, 8)]),
    Shape([(5, 16), (3, 4)]),
    Shape([(1, 4), (6, 8)]),
    Shape([(0, 4), (6, 8)]),
    Shape([(2, 8), (0, 4)], evaluates=True),
    Shape([(4, 8), (4, 8)]),
]

CASES: dict[str, dict[str, Any]] = {
    "zb-h1": {"mesh": "pp=2"},
    "1f1b": {"mesh": "pp=4"},
    "interleaved-1f1b": {"mesh": "pp=2", "chunks": 2},
    "zbv": {"mesh": "pp=2"},
    "dualpipe": {"mesh": "pp=2"},
    "dualpipe-v": {"mesh": "pp=2"},
    "seq-1f1b": {"mesh": "pp=2", "slices": 2},
    "gpipe": {"mesh": "pp=2", "recompute": 1},
}


@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
@pytest.mark.parametrize("name", CASES)
def test_steps_of_any_shape(name: str, rules: Rules) -> None:
    plan, blocks = qs.compile(name, microbatches=4, **CASES[name]), small_gpt()
    require_equal(train_on(plan, blocks, ONE, rules), train_alone(blocks, ONE))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_replicas_have_shapes_of_their_own(mesh: str, zero: int) -> None:
    plan, blocks = qs.compile("1f1b", mesh=mesh, microbatches=4, zero=zero), small_gpt()
    require_equal(train_on(plan, blocks, TWO), train_alone(blocks, TWO))
