"""Jobs that say how many blocks each stage has, and where stages lie: the same losses as one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.launch.worker import main
from quintsched.runtime.settings.job_file import JobConfig

from ...helpers.jobs import COUNTING

UNEVEN = '{mesh: "pp=2", schedule: zbv, microbatches: 4, stage_to_pp: [0, 0, 1, 1, 1, 0], stages: [1, 1, 0, 1, 3, 0]}'
ALONE = "{microbatches: 4}"
MODEL = {"name": "gpt", "options": {"hidden": 32, "depth": 4, "tied": True}}


def run_job(tmp_path: Path, parallel: str, name: str, epochs: int, *more: str) -> list[float]:
    """Run a job; returns the losses of all steps, and of the validations."""
    (tmp_path / "data.py").write_text(COUNTING)
    job, log = tmp_path / f"{name}.yaml", tmp_path / f"{name}{epochs}.jsonl"
    job.write_text(f"""
model: {json.dumps(MODEL)}
data: {{name: "{tmp_path / "data.py"}:load"}}
parallel: {parallel}
train: {{epochs: {epochs}, batch_size: 16, optimizer: {{name: adamw, lr: 0.01}}, clip: 1.0}}
runtime: {{transport: local, precision: float64}}
checkpoint: {{dir: {tmp_path / name}}}
log: {{path: {log}, every: 1}}
""")
    assert main(["--config", str(job), *more]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [r.get("validation_loss", r["loss"]) for r in records if r["event"] in ("step", "epoch")]


def test_a_job_with_uneven_stages_trains_to_the_losses_of_one_rank_also_when_it_is_resumed(tmp_path: Path) -> None:
    alone = run_job(tmp_path, ALONE, "alone", 2)
    begun = run_job(tmp_path, UNEVEN, "uneven", 1)
    resumed = run_job(tmp_path, UNEVEN, "uneven", 2, "--resume")
    assert begun + resumed == pytest.approx(alone, abs=1e-10)


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


def test_a_model_of_other_blocks_ends_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text('parallel: {mesh: "pp=2", stages: [3, 1]}\nruntime: {transport: local}\n')
    assert main(["--config", str(job)]) == 3
    error = capsys.readouterr().err
    assert "the plan's stages have 3,1 blocks, 4 of a model, but the model has 10" in error
    assert "like --stages 5,5" in error
