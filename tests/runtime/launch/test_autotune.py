"""From a job file to a plan, and runs that tune themselves: the numbers are those of the run that never switched."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.compiler import compile_request
from quintsched.plan import Plan
from quintsched.runtime import JobConfig, Transport, run_local
from quintsched.runtime.launch.job_plan import plan_of, request_of
from quintsched.runtime.launch.tune_while_training import Autotune, Proposal, Propose, step_s
from quintsched.trace.measured_trace import Trace
from tests.helpers.jobs import COUNTING, Sections, fit, joined, launch

from ...layers import ROOT

JOB: Sections = {
    "model": {"name": "gpt", "options": {"hidden": 8, "depth": 2, "heads": 2, "tied": True, "dropout": 0.1}},
    "data": {"name": "counting.py:load"},
    "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2, "schedule": "1f1b", "zero": 1},
    "train": {"epochs": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 3e-3}, "clip": 1.0},
    "runtime": {"precision": "float64"},
    "log": {"path": "log.jsonl", "every": 1},
}
FLAT = {"mesh": "pp=2", "zero": 0}
UNTIED: Sections = {"model": {"options": {"hidden": 8, "depth": 2, "heads": 2, "dropout": 0.1}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counting.py").write_text(COUNTING)
    return tmp_path


def job(*sections: Sections) -> JobConfig:
    return JobConfig.model_validate(joined(JOB, *sections))


def losses(path: str = "log.jsonl") -> list[float]:
    """Return the loss of each step, and that of each validation."""
    records = map(json.loads, Path(path).read_text().splitlines())
    return [r.get("validation_loss", r.get("loss")) for r in records if r["event"] in ("step", "epoch")]


def tuned(config: JobConfig, propose: Propose) -> list[float]:
    Path("log.jsonl").unlink(missing_ok=True)
    plan = plan_of(config)

    def run(transport: Transport) -> None:
        Autotune(config, plan, transport, propose).tune_and_train("new")

    run_local(plan.mesh.size, run)
    return losses()


def switching(config: JobConfig, changed: dict[str, object], *, keeps: bool) -> tuple[Propose, list[Plan]]:
    """Return a function that proposes a plan with changed settings, and the plans that it has been asked about."""
    asked: list[Plan] = []

    def propose(plan: Plan, trace: Trace, held: Sequence[int], blocks: Sequence[float]) -> Proposal:
        asked.append(plan)
        assert sum(held) == len(plan.routes) * len(blocks)
        assert min(blocks) > 0
        assert step_s(trace) > 0
        better = compile_request(replace(request_of(config), **changed))  # type: ignore[arg-type]
        return Proposal(better, 1e9 if keeps else 1e-9, 1.0)

    return propose, asked


@pytest.mark.parametrize(
    ("sections", "changed", "keeps"),
    [
        ({"parallel": {**FLAT, "recompute": [1, 0]}}, {"stages": (1, 3), "schedule": "gpipe"}, True),
        ({"parallel": {**FLAT, "schedule": "gpipe", "offload": 1.5}}, {"stages": (1, 3)}, True),
        ({"parallel": {**FLAT, "schedule": "chimera"}, **UNTIED}, {"stages": (1, 3, 1, 3)}, True),
        pytest.param({"parallel": {"zero": 3}}, {"stages": (3, 1), "schedule": "zb-h1"}, False, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_the_run_that_never_switched(
    sections: Sections, changed: dict[str, object], keeps: bool
) -> None:
    fit(job(sections))
    expected = losses()
    config = job(sections, {"checkpoint": {"dir": "saved"}})
    propose, asked = switching(config, changed, keeps=keeps)
    found = tuned(config, propose)
    assert len(asked) == 1
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    assert {path.name for path in Path("saved-autotune").iterdir()} == {"before", "after"}
    last = Plan.load(Path("saved") / "plan.json")
    assert (last.blocks_per_stage == changed["stages"]) == keeps


def test_wrong_requests(capsys: pytest.CaptureFixture[str]) -> None:
    saved: Sections = {"checkpoint": {"dir": "saved"}, "log": {"path": None}}
    overlapped = {"schedule": "dualpipe", "overlap": True, "microbatches": 4}
    plan_of(job()).save("plan.json")
    for sections, more, why in (
        ({"log": {"path": None}}, (), "set checkpoint.dir"),
        ({**saved, "checkpoint": {"dir": "memory://runs/1"}}, (), "set checkpoint.dir to one"),
        ({**saved, "train": {"max_steps": 9}}, (), "--autotune measures 20 steps; the training has 9"),
        ({**saved, "runtime": {"trace": "traces"}}, (), "leave the trace out"),
        ({**saved, **UNTIED, "parallel": overlapped}, (), "--autotune: plans with Overlap, as this one, are"),
        (saved, ("plan.json",), "leave the plan file out"),
    ):
        assert launch(JOB, sections, arguments=("--autotune", *more)) == 2
        assert why in capsys.readouterr().err
    assert not Path("saved").exists()


def job_of(**sections: dict[str, object]) -> JobConfig:
    return JobConfig.model_validate(sections)


def saved(tmp_path: Path, schedule: str = "gpipe", mesh: str = "pp=2", **more: Any) -> tuple[Path, qs.Plan]:
    """Save a plan; return its path and itself."""
    plan, path = qs.compile(schedule, mesh=mesh, microbatches=4, **more), tmp_path / "plan.json"
    plan.save(path)
    return path, plan


def test_a_plan_file_wins_where_the_section_is_silent_and_is_refused_where_it_disagrees(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    assert plan_of(job_of(), path).schedule.name == "gpipe"
    assert plan_of(job_of(parallel={"plan": str(path), "mesh": "pp=2"})).schedule.name == "gpipe"
    words = r"schedule is 1f1b in .*; mesh is pp=4 in the job file but pp=2 in the plan"
    with pytest.raises(qs.MisfitError, match=words):
        plan_of(job_of(parallel={"mesh": "pp=4", "schedule": "1f1b"}), path)


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(qs.MisfitError, match=r"32 does not divide into 24 .*: 24 or 48"):
        plan_of(job_of(parallel={"mesh": "dp=3,pp=2", "microbatches": 8}))


def test_the_world_has_to_be_the_mesh() -> None:
    with pytest.raises(qs.MisfitError, match="has 4 ranks, but 1 process was started; use torchrun --nproc-per-node 4"):
        qs.compile("1f1b", mesh="pp=4", microbatches=4).mesh.require_world_size(1)


def test_a_job_names_a_schedule_of_its_users(tmp_path: Path) -> None:
    file, path = ROOT / "examples" / "custom_schedule.py", tmp_path / "own.json"
    own = job_of(parallel={"mesh": "pp=2", "microbatches": 4, "schedule": f"{file}:paired_1f1b"})
    plan = plan_of(own)
    assert plan.schedule.name == "paired-1f1b"
    plan.save(path)
    assert plan_of(own, path) == plan
    with pytest.raises(qs.MisfitError, match="schedule is paired-1f1b in the job file but 1f1b in the plan"):
        plan_of(own, saved(tmp_path, "1f1b")[0])
    with pytest.raises(qs.UsageError, match="has no 'nobody'"):
        plan_of(job_of(parallel={"mesh": "pp=2", "schedule": f"{file}:nobody"}))


@pytest.mark.parametrize(
    ("stages", "tied"), [([1, 4, 1], {"embedding": (0, 2)}), ([2, 4, 0], {"embedding": (0, 1)}), ([6, 0, 0], {})]
)
def test_what_a_model_ties_lies_on_the_last_stage_with_blocks(stages: list[int], tied: dict[str, object]) -> None:
    model = {"name": "gpt", "options": {"hidden": 32, "depth": 4, "tied": True}}
    plan = plan_of(job_of(model=model, parallel={"mesh": "pp=3", "stages": stages}))
    assert (plan.tied, plan.blocks_per_stage) == (tied, tuple(stages))


def test_stages_cannot_be_measured_and_given(tmp_path: Path) -> None:
    with pytest.raises(qs.UsageError, match=r"balance is measured, but .* \(3,1\); leave out one of them"):
        plan_of(job_of(parallel={"mesh": "pp=2", "stages": [3, 1], "balance": "measured"}))
    path, _ = saved(tmp_path, "1f1b", stages=[3, 1])
    with pytest.raises(qs.UsageError, match="balance is measured"):
        plan_of(job_of(parallel={"balance": "measured"}), path)
