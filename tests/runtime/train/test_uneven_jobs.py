"""Jobs that say how many blocks each stage has, and where stages lie: the same losses as one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.settings.job_file import JobConfig

MODEL = {"name": "gpt", "options": {"hidden": 32, "depth": 4, "tied": True}}


@pytest.mark.parametrize(
    ("stages", "tied"),
    [([1, 4, 1], {"embedding": (0, 2)}), ([2, 4, 0], {"embedding": (0, 1)}), ([6, 0, 0], {})],
)
def test_what_a_model_ties_lies_on_the_last_stage_with_blocks(stages: list[int], tied: dict[str, object]) -> None:
    job = {"model": MODEL, "parallel": {"mesh": "pp=3", "stages": stages}}
    plan = plan_of(JobConfig.model_validate(job))
    assert (plan.tied, plan.blocks_per_stage) == (tied, tuple(stages))


def test_stages_cannot_be_measured_and_given(tmp_path: Path) -> None:
    job = JobConfig.model_validate({"parallel": {"mesh": "pp=2", "stages": [3, 1], "balance": "measured"}})
    with pytest.raises(qs.UsageError, match=r"balance is measured, but .* \(3,1\); leave out one of them"):
        plan_of(job)
    path = tmp_path / "plan.json"
    qs.compile("1f1b", mesh="pp=2", microbatches=1, stages=[3, 1]).save(path)
    with pytest.raises(qs.UsageError, match="balance is measured"):
        plan_of(JobConfig.model_validate({"parallel": {"balance": "measured"}}), path)
