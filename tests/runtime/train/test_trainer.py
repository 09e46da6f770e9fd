"""The trainer: what it logs, when it stops, that a resumed run goes on to the same numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, read_manifest
from quintsched.trace.measured_trace import Trace

from ...helpers.jobs import data_file, figures, fit, interrupt_after, job

__all__ = ["data_file"]


def test_the_log(data_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    history, _, said = fit(job(data_file, log={"path": str(path), "every": 2}))[0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["event"] == "start"
    steps = [r for r in records if r["event"] == "step"]
    assert [r["step"] for r in steps] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    for record in steps:
        assert 0 < record["bubble"] < 1
        assert record["step_s"] > 0
        assert record["samples_per_s"] > 0
        assert math.isfinite(record["grad_norm"])
        assert 0 <= record["accuracy"] <= 1
    assert [r for r in records if r["event"] == "epoch"] == history
    lines = [line.split("  ")[0] for line in said]
    assert lines[:4] == ["step 2/18", "step 4/18", "step 6/18", "epoch 1/3"]
    assert [line for line in lines if line.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert said[-1].startswith("trained: 18 steps in ")
    end = records[-1]
    assert (end["event"], end["step"]) == ("end", 18)
    mean = sum(r["bubble"] * r["step_s"] for r in steps) / sum(r["step_s"] for r in steps)
    assert end["bubble"] == pytest.approx(mean)
    assert end["planned_bubble"] == plan_of(job(data_file)).simulate().bubble
    assert said[-1].endswith(f"bubble {end['bubble']:.1%} (planned {end['planned_bubble']:.1%})")


def test_a_group_of_parameters_that_the_model_does_not_have_is_refused(data_file: Path) -> None:
    last, nowhere = ({"params": [name], "lr": 1e-4} for name in ("*.fc.bias", "*.fcc.bias"))
    settings = {"parallel": {"mesh": "pp=2"}, "train": {"max_steps": 1, "optimizer": {"groups": [last]}}}
    fit(job(data_file, **settings))  # the first stage has no such parameter
    settings["train"]["optimizer"] = {"groups": [last, nowhere]}
    with pytest.raises(qs.UsageError, match=r"groups\.1\.params: no parameter of the model is called '\*\.fcc\.bias'"):
        fit(job(data_file, **settings))


def test_a_trace_of_more_steps_than_there_are_is_written_at_the_end(data_file: Path, tmp_path: Path) -> None:
    trace = {"trace": str(tmp_path / "trace"), "trace_first": 4, "trace_steps": 9}
    fit(job(data_file, train={"epochs": 1}, runtime=trace))
    steps = json.loads((tmp_path / "trace" / "rank0.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [4, 5]
    plan = qs.Plan.load(tmp_path / "trace" / "plan.json")  # that of the run: its traces are read with it
    assert Trace.load(tmp_path / "trace", plan)
    other = qs.compile(plan.schedule.name, mesh=plan.mesh, microbatches=plan.schedule.microbatches + 1)
    with pytest.raises(qs.MisfitError, match=r"another plan: schedule\.microbatches is \d+ there, but \d+ here"):
        Trace.load(tmp_path / "trace", other)


@pytest.mark.parametrize(("every", "dropout"), [(0, 0.0), (4, 0.1)])
def test_a_resumed_run_goes_on_to_the_same_numbers(data_file: Path, tmp_path: Path, every: int, dropout: float) -> None:
    sections: dict[str, dict[str, Any]] = {
        "model": {"options": {"hidden": 8, "depth": 2, "heads": 2, "dropout": dropout}},
        "train": {"lr_schedule": {"name": "cosine", "warmup_steps": 3}},
    }
    whole = fit(job(data_file, **sections))
    saved = job(data_file, **sections, checkpoint={"dir": str(tmp_path / "c"), "every": every})
    interrupt_after(saved, steps=10)
    for (history, weights, said), (expected, expected_weights, _) in zip(fit(saved, resume=True), whole, strict=True):
        assert said[0] == f"resumed after step {8 if every else 6}"
        assert figures(history) == figures(expected)
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


def checkpointed(data_file: Path, tmp_path: Path, **sections: Any) -> Any:
    return job(data_file, checkpoint={"dir": str(tmp_path / "c")} | sections.pop("checkpoint", {}), **sections)


def test_resume_after_a_loss_that_was_not_finite(data_file: Path, tmp_path: Path) -> None:
    train = {"optimizer": {"name": "sgd", "lr": 1e30}, "clip": None, "epochs": 2, "max_skipped": 0}
    config = checkpointed(data_file, tmp_path, train=train, checkpoint={"every": 4})
    interrupt_after(config, steps=5)
    history, _, _ = fit(config, resume=True)[0]
    assert [record["step"] for record in history] == [6, 12]
    assert math.isnan(history[-1]["loss"])


def test_progress_that_cannot_be_understood_is_refused(data_file: Path, tmp_path: Path) -> None:
    config = checkpointed(data_file, tmp_path, train={"epochs": 1})
    fit(config)
    path = tmp_path / "c" / "step-00000006" / MANIFEST
    manifest = read_manifest(path, 6)
    for change, place in (({"epoch": "one"}, "/epoch"), ({"epoc": 1}, "/epoc: ")):
        path.write_bytes(manifest.model_copy(update={"progress": manifest.progress | change}).to_json())
        with pytest.raises(qs.InputError, match=f"the checkpoint's progress: {place}"):
            fit(config, resume=True)


def test_weights_that_cannot_be_written_are_refused_before_the_first_step(data_file: Path) -> None:
    config = job(data_file, parallel={"mesh": "dp=1"}, checkpoint={"export": "/proc/self/weights"})
    with pytest.raises(qs.UsageError, match="/proc/self: cannot write the weights: No such file"):
        interrupt_after(config, steps=0)
