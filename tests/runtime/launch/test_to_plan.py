"""From a job file to a plan, and what is refused on the way."""

from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime import JobConfig, plan_of

from ...layers import ROOT


def job(**sections: dict[str, object]) -> JobConfig:
    return JobConfig.model_validate(sections)


def saved(tmp_path: Path, schedule: str = "gpipe", mesh: str = "pp=2", **more: Any) -> tuple[Path, qs.Plan]:
    """Save a plan; return its path and itself."""
    plan, path = qs.compile(schedule, mesh=mesh, microbatches=4, **more), tmp_path / "plan.json"
    plan.save(path)
    return path, plan


def test_a_plan_file_wins_where_the_section_is_silent_and_is_refused_where_it_disagrees(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    assert plan_of(job(), path).schedule.name == "gpipe"
    assert plan_of(job(parallel={"plan": str(path), "mesh": "pp=2"})).schedule.name == "gpipe"
    words = r"schedule is 1f1b in .*; mesh is pp=4 in the job file but pp=2 in the plan"
    with pytest.raises(qs.MisfitError, match=words):
        plan_of(job(parallel={"mesh": "pp=4", "schedule": "1f1b"}), path)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(qs.MisfitError, match=r"32 does not divide into 24 .*: 24 or 48"):
        plan_of(job(parallel={"mesh": "dp=3,pp=2", "microbatches": 8}))


def test_the_world_has_to_be_the_mesh() -> None:
    with pytest.raises(qs.MisfitError, match="has 4 ranks, but 1 process was started; use torchrun --nproc-per-node 4"):
        qs.compile("1f1b", mesh="pp=4", microbatches=4).mesh.require_world_size(1)


def test_a_job_names_a_schedule_of_its_users(tmp_path: Path) -> None:
    file, path = ROOT / "examples" / "custom_schedule.py", tmp_path / "own.json"
    own = job(parallel={"mesh": "pp=2", "microbatches": 4, "schedule": f"{file}:paired_1f1b"})
    plan = plan_of(own)
    assert plan.schedule.name == "paired-1f1b"
    plan.save(path)
    assert plan_of(own, path) == plan
    with pytest.raises(qs.MisfitError, match="schedule is paired-1f1b in the job file but 1f1b in the plan"):
        plan_of(own, saved(tmp_path, "1f1b")[0])
    with pytest.raises(qs.UsageError, match="has no 'nobody'"):
        plan_of(job(parallel={"mesh": "pp=2", "schedule": f"{file}:nobody"}))


@pytest.mark.parametrize(
    ("stages", "tied"), [([1, 4, 1], {"embedding": (0, 2)}), ([2, 4, 0], {"embedding": (0, 1)}), ([6, 0, 0], {})]
)
def test_what_a_model_ties_lies_on_the_last_stage_with_blocks(stages: list[int], tied: dict[str, object]) -> None:
    model = {"name": "gpt", "options": {"hidden": 32, "depth": 4, "tied": True}}
    plan = plan_of(job(model=model, parallel={"mesh": "pp=3", "stages": stages}))
    assert (plan.tied, plan.blocks_per_stage) == (tied, tuple(stages))


def test_stages_cannot_be_measured_and_given(tmp_path: Path) -> None:
    with pytest.raises(qs.UsageError, match=r"balance is measured, but .* \(3,1\); leave out one of them"):
        plan_of(job(parallel={"mesh": "pp=2", "stages": [3, 1], "balance": "measured"}))
    path, _ = saved(tmp_path, "1f1b", stages=[3, 1])
    with pytest.raises(qs.UsageError, match="balance is measured"):
        plan_of(job(parallel={"balance": "measured"}), path)
