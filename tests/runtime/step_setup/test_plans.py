"""Another number of microbatches: compiled again where the plan names a schedule, else the last have no samples."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import quintsched as qs
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.training import require_equal
from ..toys import sgd
from .changing import Shape, batches, small_gpt, train_alone, train_on

SHAPES = [
    Shape([(4, 8)]),
    Shape([(6, 8)], microbatches=3),
    Shape([(6, 8)], microbatches=2),
    Shape([(5, 8)], microbatches=3, evaluates=True),
    Shape([(4, 8)]),
    Shape([(2, 4)], microbatches=3),
]


def edited(plan: qs.Plan) -> qs.Plan:
    """Return a plan that no schedule's name compiles to."""
    return replace(plan, schedule=ScheduleSpec("by-hand", plan.schedule.microbatches))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_a_plan_is_compiled_again(name: str, zero: int, caplog: pytest.LogCaptureFixture) -> None:
    plan, blocks = qs.compile(name, mesh="pp=2", microbatches=4), small_gpt()
    with caplog.at_level(logging.INFO):
        require_equal(train_on(plan, blocks, SHAPES), train_alone(blocks, SHAPES))
    assert f"the plan ({name}) was compiled again for 3 microbatches" in caplog.text
    both = [Shape([(2, 8), (3, 8)], microbatches=k) for k in (3, 2, 6)]
    plan = qs.compile(name, mesh="dp=2", microbatches=4, zero=zero)
    require_equal(train_on(plan, blocks, both), train_alone(blocks, both))


def test_a_plan_of_ones_own_is_padded() -> None:
    plan, blocks = edited(qs.compile("1f1b", mesh="pp=2", microbatches=4)), small_gpt()
    require_equal(train_on(plan, blocks, SHAPES), train_alone(blocks, SHAPES))


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_ranks_that_want_other_numbers_are_told_so(mesh: str) -> None:
    plan, (batch,) = qs.compile("1f1b", mesh=mesh, microbatches=2), batches(SHAPES[0], 0)

    def run(transport: Transport) -> None:
        engine = Engine(plan, small_gpt(), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        with pytest.raises(qs.MisfitError, match="have from 3 to 4 microbatches"):
            engine.step(*batch, microbatches=3 + transport.rank)

    run_local(2, run)


def test_more_microbatches_than_a_plan_of_ones_own_has_are_refused() -> None:
    plan, (batch,) = edited(qs.compile("1f1b", mesh="pp=2", microbatches=2)), batches(SHAPES[0], 0)

    def run(transport: Transport) -> None:
        engine = Engine(plan, small_gpt(), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        with pytest.raises(qs.UsageError, match=r"has 2 microbatches, and it cannot be compiled again for 4"):
            engine.step(*batch, microbatches=4)
        assert torch.isfinite(engine.step(*batch).loss)

    run_local(2, run)
