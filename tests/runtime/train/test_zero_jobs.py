"""Jobs with ZeRO: the same losses as without it, also when they are resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.runtime.launch.worker import main

from ...helpers.jobs import COUNTING

JOB = """
model: {name: gpt, options: {hidden: 32, depth: 2, tied: true}}
data: {name: "DATA:load"}
parallel: {mesh: "dp=2,pp=2", microbatches: 2, zero: ZERO}
train: {epochs: EPOCHS, batch_size: 16, optimizer: {name: adamw, lr: 0.01, weight_decay: 0.1, decay: matrices}}
runtime: {transport: local, precision: PRECISION}
checkpoint: {dir: FOLDER}
log: {path: LOG, every: 1}
"""


def run_job(tmp_path: Path, folder: str, zero: int, epochs: int, precision: str, *more: str) -> list[float]:
    """Run a job; returns the losses of all steps, and of the validations."""
    (tmp_path / "data.py").write_text(COUNTING)
    job, log = tmp_path / "job.yaml", tmp_path / f"{folder}{epochs}.jsonl"
    values = {"DATA": str(tmp_path / "data.py"), "FOLDER": str(tmp_path / folder), "LOG": str(log)}
    text = JOB
    for name, value in (values | {"ZERO": str(zero), "EPOCHS": str(epochs), "PRECISION": precision}).items():
        text = text.replace(name, value)
    job.write_text(text)
    assert main(["--config", str(job), *more]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [r.get("validation_loss", r["loss"]) for r in records if r["event"] in ("step", "epoch")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_job_trains_to_the_same_losses(tmp_path: Path, zero: int) -> None:
    expected = run_job(tmp_path, "whole", 0, 1, "float64")
    assert run_job(tmp_path, "sharded", zero, 1, "float64") == pytest.approx(expected, abs=1e-10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [2, 3])
def test_a_job_that_is_resumed_goes_on_as_if_never_stopped(tmp_path: Path, zero: int) -> None:
    through = run_job(tmp_path, "through", zero, 2, "bfloat16")
    begun = run_job(tmp_path, "stopped", zero, 1, "bfloat16")
    resumed = run_job(tmp_path, "stopped", zero, 2, "bfloat16", "--resume")
    assert begun + resumed == through


def test_a_plan_of_another_zero_than_its_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    qs.compile("1f1b", mesh="dp=2", microbatches=1, zero=2).save(plan)
    job = tmp_path / "job.yaml"
    job.write_text('parallel: {mesh: "dp=2", zero: 3}\nruntime: {transport: local}\n')
    assert main([str(plan), "--config", str(job)]) == 3
    assert "zero is 3 in the job file but 2 in the plan" in capsys.readouterr().err
