"""The trainer: its log and trace, lengths and intervals of a training, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime import JobConfig, plan_of
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, read_manifest
from quintsched.runtime.settings.intervals import Interval
from quintsched.trace.measured_trace import Trace

from ...helpers.jobs import Sections, fit, interrupt_after, job, joined


def test_the_log(data_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    history, _, said = fit(job(data_file, log={"path": str(path), "every": 2}))[0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["event"] == "start"
    steps = [r for r in records if r["event"] == "step"]
    assert [r["step"] for r in steps] == [2, 4, 6, 8, 10, 12, 14, 16, 18]
    for record in steps:
        assert 0 < record["bubble"] < 1
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


def test_resume_after_a_loss_that_was_not_finite(data_file: Path, tmp_path: Path) -> None:
    train = {"optimizer": {"name": "sgd", "lr": 1e30}, "clip": None, "epochs": 2, "max_skipped": 0}
    config = job(data_file, train=train, checkpoint={"dir": str(tmp_path / "c"), "every": 4})
    interrupt_after(config, steps=5)
    history, _, _ = fit(config, resume=True)[0]
    assert [record["step"] for record in history] == [6, 12]
    assert math.isnan(history[-1]["loss"])


def test_progress_that_cannot_be_understood_is_refused(data_file: Path, tmp_path: Path) -> None:
    config = job(data_file, train={"epochs": 1}, checkpoint={"dir": str(tmp_path / "c")})
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


SIZES = {"hidden": 8, "depth": 2, "heads": 2}


def text_job(tmp_path: Path, name: str = "log", **sections: dict[str, Any]) -> JobConfig:
    """Return a small text job: 4 batches of 32 samples of 8 tokens in an epoch."""
    usual: Sections = {
        "model": {"name": "gpt", "options": SIZES},
        "data": {"name": "text", "options": {"sequence": 8, "max_bytes": 1000}},
        "parallel": {"mesh": "pp=2", "microbatches": 2},
        "train": {"batch_size": 32, "optimizer": {"name": "adamw", "lr": 1e-2}},
        "runtime": {"precision": "float64"},
        "log": {"path": str(tmp_path / f"{name}.jsonl"), "every": 1},
    }
    return JobConfig.model_validate(joined(usual, sections))


def records_of(config: JobConfig, *, resume: bool = False) -> list[dict[str, Any]]:
    """Train, and return the records of the log."""
    fit(config, resume=resume)
    return [json.loads(line) for line in Path(str(config.log.path)).read_text().splitlines()]


def steps(records: list[dict[str, Any]], event: str) -> list[int]:
    return [record["step"] for record in records if record["event"] == event]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["event"] == "step"]


def test_max_steps_end_within_an_epoch_and_a_longer_run_goes_on_to_the_sample(tmp_path: Path) -> None:
    whole = records_of(text_job(tmp_path, "whole", train={"max_steps": 10}))
    assert (steps(whole, "step"), steps(whole, "epoch")) == ([*range(1, 11)], [4, 8, 10])
    saved = {"dir": str(tmp_path / "saved")}
    first = records_of(text_job(tmp_path, "first", train={"max_steps": 6}, checkpoint=saved))
    assert math.isfinite(first[-2]["validation_loss"])
    again = records_of(text_job(tmp_path, "again", train={"max_steps": 10}, checkpoint=saved), resume=True)
    assert losses(first) + losses(again) == losses(whole)
    assert (
        records_of(text_job(tmp_path, "nothing", train={"max_steps": 10}, checkpoint=saved), resume=True)[-1]["event"]
        == "start"
    )


def test_evaluations_between_change_no_number_and_stop_early(tmp_path: Path) -> None:
    plain = records_of(text_job(tmp_path, "plain", train={"max_steps": 6}))
    often = records_of(text_job(tmp_path, "often", train={"max_steps": 6, "evaluate_every": 2}))
    assert steps(often, "evaluation") == [2]
    assert [r["step"] for r in often if r["event"] == "epoch" and "validation_loss" in r] == [4, 6]
    assert losses(often) == losses(plain)
    assert often[-2]["validation_loss"] == plain[-2]["validation_loss"]
    assert often[-2]["validation_perplexity"] == pytest.approx(math.exp(often[-2]["validation_loss"]))
    frozen = {"max_steps": 6, "evaluate_every": 1, "patience": 2, "optimizer": {"lr": 0.0}}
    assert steps(records_of(text_job(tmp_path, "frozen", train=frozen)), "step") == [1, 2, 3]


def test_intervals_in_tokens_and_time(tmp_path: Path) -> None:
    by_tokens = text_job(tmp_path, "tokens", train={"max_steps": 6}, log={"every": "512 tokens"})
    assert steps(records_of(by_tokens), "step") == [2, 4, 6]  # 32 samples of 8 tokens in a step
    by_time = text_job(tmp_path, "time", train={"max_steps": 6}, log={"every": "1 h"}, checkpoint={"every": "0.01 s"})
    assert steps(records_of(by_time), "step") == [4, 6]  # an epoch's last step where it would have none
    images = JobConfig.model_validate({"model": {"options": SIZES}, "log": {"every": "1k tokens"}})
    with pytest.raises(qs.UsageError, match="counts tokens, but the inputs are no token ids"):
        fit(images)


def test_a_record_has_rates_and_memory(tmp_path: Path) -> None:
    record = next(r for r in records_of(text_job(tmp_path, log={"peak_tflops": 1e-3})) if r["event"] == "step")
    assert record["tokens_per_s"] == pytest.approx(8 * record["samples_per_s"])
    assert record["samples_per_s"] == pytest.approx(32 / record["step_s"])
    assert record["memory_gb"] > 0
    assert record["left_s"] == pytest.approx(3 * record["step_s"])
    assert record["lr"] == 1e-2
    layer, head = 12 * 8 * 8, 8 * 256  # per token: products of a layer of hidden size 8, of the head over 256 bytes
    flops = 6 * (2 * layer + head) * 8 * 32 + 3 * 2 * 4 * 8 * 8 * 8 * 32  # and of attention, scores and values
    assert record["mfu"] == pytest.approx(flops / (record["step_s"] * 2 * 1e9), rel=1e-2)


def test_intervals_are_read_and_other_words_are_none() -> None:
    assert Interval.from_text(50) == Interval.from_text("50 steps") == (50, "steps")
    assert Interval.from_text("5M tokens") == (5e6, "tokens")
    for written, seconds in (("90 s", 90), ("1.5 h", 5400), ("10min", 600)):
        assert Interval.from_text(written) == (seconds, "seconds")
    for written in ("", "often", "0 s", "1.5 steps", "-3 s", "5 apples"):
        with pytest.raises(ValueError, match=r"no interval|no whole number"):
            Interval.from_text(written)
