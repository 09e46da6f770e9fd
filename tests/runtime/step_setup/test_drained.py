"""Replicas whose data end sooner: all end together, with the numbers of one process that has all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.runtime import Engine, drained
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ...helpers.training import Outcome, require_equal
from ..toys import sgd
from .changing import Batch, Shape, batches, small_gpt, train_alone

STEPS = [Shape([(4, 8), (4, 8)]), Shape([(3, 8), (2, 4)]), Shape([(4, 8), (0, 8)]), Shape([(2, 16), (0, 8)])]


def loader(replica: int) -> list[Batch]:
    """Return a replica's batches: four of the first, two of the second."""
    found = [batches(shape, step)[replica] for step, shape in enumerate(STEPS)]
    return [batch for batch in found if len(batch[0])]


def engine_of(transport: Transport, plan: qs.Plan) -> Engine:
    return Engine(
        plan,
        small_gpt(),
        cross_entropy_sum,
        sgd,
        metrics={"accuracy": correct_sum},
        dtype=torch.float64,
        transport=transport,
    )


def outcome(results: list[Any], engine: Engine) -> Outcome:
    figures = [(result.weight.item(), result.metrics["accuracy"].item()) for result in results]
    return Outcome([result.loss.item() for result in results], engine.full_weights(), figures=figures)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_drained_loaders_end_together(mesh: str, zero: int) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)

    def run(transport: Transport) -> Outcome:
        engine = engine_of(transport, plan)
        needs_data = engine.needs_inputs or engine.needs_targets
        results = [
            engine.step(inputs, targets)
            for inputs, targets in drained(loader(engine.replica) if needs_data else None, engine)
        ]
        return outcome(results, engine)

    require_equal(run_local(plan.mesh.size, run), train_alone(small_gpt(), STEPS))


def test_no_more_data_waits_for_the_others() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)

    def run(transport: Transport) -> tuple[Outcome, int]:
        engine = engine_of(transport, plan)
        results = [engine.step(*batch) for batch in loader(engine.replica)]
        later = engine.no_more_data(results.append)
        assert engine.state_dict()["engine.step"] == len(STEPS)
        return outcome(results, engine), later

    found = run_local(4, run)
    assert [later for _, later in found] == [0, 0, 2, 2]
    require_equal([run for run, _ in found], train_alone(small_gpt(), STEPS))


def test_a_step_in_which_nobody_has_samples_is_refused_on_all_ranks() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2)

    def run(transport: Transport) -> float:
        engine = engine_of(transport, plan)
        inputs, targets = batches(STEPS[0], 0)[engine.replica]
        engine.step(inputs, targets)
        with pytest.raises(qs.MisfitError, match="no replica has samples"):
            engine.step(inputs[:0], targets[:0])
        return engine.step(inputs, targets).loss.item()

    assert len(set(run_local(2, run))) == 1
