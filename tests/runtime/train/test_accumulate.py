"""A job that accumulates gradients trains as one with large batches does."""

from __future__ import annotations

import pytest

from quintsched.errors import MisfitError
from quintsched.runtime import JobConfig, Trainer, plan_of
from quintsched.runtime.comm import Transport, run_local


def job(accumulate: int, batch_size: int = 32) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"options": {"depth": 2, "hidden": 16, "heads": 2}},
            "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2, "zero": 1},
            "train": {"batch_size": batch_size, "accumulate": accumulate, "clip": 1.0},
            "runtime": {"precision": "float64"},
        }
    )


def losses(accumulate: int) -> list[float]:
    def run(transport: Transport) -> list[float]:
        trainer = Trainer.of_job(job(accumulate), plan_of(job(accumulate)), transport)
        (record,) = trainer.fit()
        return [record["loss"], record["validation_loss"], record["step"]]

    return run_local(4, run, timeout_s=120)[0]


def test_batches_in_parts_train_as_whole_ones() -> None:
    assert losses(4) == pytest.approx(losses(1), rel=1e-9)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(MisfitError, match="x train"):
        plan_of(job(3))
