"""Lengths and intervals of a training: max_steps, evaluations within epochs, intervals in steps, tokens and time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.settings.intervals import Interval
from quintsched.runtime.settings.job_file import JobConfig

from ...helpers import jobs

SIZES = {"hidden": 8, "depth": 2, "heads": 2}


def job(tmp_path: Path, name: str = "log", **sections: dict[str, Any]) -> JobConfig:
    """Return a small text job: 4 batches of 32 samples of 8 tokens in an epoch."""
    values: dict[str, Any] = {
        "model": {"name": "gpt", "options": SIZES},
        "data": {"name": "text", "options": {"sequence": 8, "max_bytes": 1000}},
        "parallel": {"mesh": "pp=2", "microbatches": 2},
        "train": {"batch_size": 32, "optimizer": {"name": "adamw", "lr": 1e-2}},
        "runtime": {"precision": "float64"},
        "log": {"path": str(tmp_path / f"{name}.jsonl"), "every": 1},
    }
    for section, more in sections.items():
        values[section] = values.get(section, {}) | more
    return JobConfig.model_validate(values)


def fit(config: JobConfig, *, resume: bool = False) -> list[dict[str, Any]]:
    """Train, and return the records of the log."""
    jobs.fit(config, resume=resume)
    return [json.loads(line) for line in Path(str(config.log.path)).read_text().splitlines()]


def steps(records: list[dict[str, Any]], event: str) -> list[int]:
    return [record["step"] for record in records if record["event"] == event]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["event"] == "step"]


def test_max_steps_end_within_an_epoch_and_a_longer_run_goes_on_to_the_sample(tmp_path: Path) -> None:
    whole = fit(job(tmp_path, "whole", train={"max_steps": 10}))
    assert (steps(whole, "step"), steps(whole, "epoch")) == ([*range(1, 11)], [4, 8, 10])
    saved = {"dir": str(tmp_path / "saved")}
    first = fit(job(tmp_path, "first", train={"max_steps": 6}, checkpoint=saved))
    assert math.isfinite(first[-2]["validation_loss"])
    again = fit(job(tmp_path, "again", train={"max_steps": 10}, checkpoint=saved), resume=True)
    assert losses(first) + losses(again) == losses(whole)
    assert fit(job(tmp_path, "nothing", train={"max_steps": 10}, checkpoint=saved), resume=True)[-1]["event"] == "start"


def test_evaluations_between_change_no_number_and_stop_early(tmp_path: Path) -> None:
    plain = fit(job(tmp_path, "plain", train={"max_steps": 6}))
    often = fit(job(tmp_path, "often", train={"max_steps": 6, "evaluate_every": 2}))
    assert steps(often, "evaluation") == [2]
    assert [r["step"] for r in often if r["event"] == "epoch" and "validation_loss" in r] == [4, 6]
    assert losses(often) == losses(plain)
    assert often[-2]["validation_loss"] == plain[-2]["validation_loss"]
    assert often[-2]["validation_perplexity"] == pytest.approx(math.exp(often[-2]["validation_loss"]))
    frozen = {"max_steps": 6, "evaluate_every": 1, "patience": 2, "optimizer": {"lr": 0.0}}
    assert steps(fit(job(tmp_path, "frozen", train=frozen)), "step") == [1, 2, 3]


def test_intervals_in_tokens_and_time(tmp_path: Path) -> None:
    by_tokens = job(tmp_path, "tokens", train={"max_steps": 6}, log={"every": "512 tokens"})
    assert steps(fit(by_tokens), "step") == [2, 4, 6]  # 32 samples of 8 tokens in a step
    by_time = job(tmp_path, "time", train={"max_steps": 6}, log={"every": "1 h"}, checkpoint={"every": "0.01 s"})
    assert steps(fit(by_time), "step") == [4, 6]  # an epoch's last step where it would have none
    images = JobConfig.model_validate({"model": {"options": SIZES}, "log": {"every": "1k tokens"}})
    with pytest.raises(qs.UsageError, match="counts tokens, but the inputs are no token ids"):
        jobs.fit(images)


def test_a_record_has_rates_and_memory(tmp_path: Path) -> None:
    record = next(r for r in fit(job(tmp_path, log={"peak_tflops": 1e-3})) if r["event"] == "step")
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
