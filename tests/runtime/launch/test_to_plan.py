"""From a job file to a plan, and what is refused on the way."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.runtime.job.config import JobConfig
from quintsched.runtime.launch.to_plan import plan_of


def job(**sections: dict[str, object]) -> JobConfig:
    return JobConfig.model_validate(sections)


def test_the_parallel_section_is_compiled() -> None:
    plan = plan_of(job(parallel={"mesh": "dp=2,pp=2", "schedule": "interleaved-1f1b", "microbatches": 4}))
    assert plan == qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=4)


def test_a_plan_file_wins_where_the_section_is_silent(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    qs.compile("gpipe", mesh="pp=2", microbatches=4).save(path)
    assert plan_of(job(), path).schedule.name == "gpipe"
    assert plan_of(job(parallel={"plan": str(path), "mesh": "pp=2"})).schedule.name == "gpipe"


def test_a_plan_file_that_disagrees_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    qs.compile("gpipe", mesh="pp=2", microbatches=4).save(path)
    with pytest.raises(qs.MisfitError, match="mesh is pp=4 in the job file but pp=2 in the plan; schedule is 1f1b"):
        plan_of(job(parallel={"mesh": "pp=4", "schedule": "1f1b"}), path)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"recompute": 1}, r"recompute is \(1, 1\) in the job file but \(0, 2\) in the plan"),
        ({"recompute": [0, 1]}, r"recompute is \(0, 1\) in the job file but \(0, 2\) in the plan"),
        ({"tied": {"w": [0, 1]}}, r"tied is \{'w': \(0, 1\)\} in the job file but \{'v': \(0, 1\)\} in the plan"),
    ],
)
def test_a_plan_file_that_recomputes_or_ties_something_else_is_refused(
    tmp_path: Path, said: dict[str, object], words: str
) -> None:
    path = tmp_path / "plan.json"
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4, recompute=[0, 2], tied={"v": (0, 1)})
    plan.save(path)
    with pytest.raises(qs.MisfitError, match=words):
        plan_of(job(parallel=said), path)
    assert plan_of(job(parallel={"recompute": [0, 2], "tied": {"v": [0, 1]}}), path) == plan


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(qs.MisfitError, match=r"32 does not divide into 24 .*: 24 or 48"):
        plan_of(job(parallel={"mesh": "dp=3,pp=2", "microbatches": 8}))


def test_the_world_has_to_be_the_mesh() -> None:
    with pytest.raises(qs.MisfitError, match="has 4 ranks, but 1 process was started; use torchrun --nproc-per-node 4"):
        qs.compile("1f1b", mesh="pp=4", microbatches=4).mesh.require_world_size(1)
