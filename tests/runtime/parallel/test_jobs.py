"""Jobs train to the same losses however a mesh shares out their tokens, layers and experts, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintsched.runtime.launch.worker import main

from ...helpers.jobs import COUNTING

Records = list[dict[str, Any]]
MOE = {"name": "moe-gpt", "options": {"hidden": 32, "depth": 2, "experts": 4, "mlp_ratio": 1}}
JOBS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "tokens": [
        ({"tied": True}, {"mesh": "pp=1"}),
        ({"tied": True}, {"mesh": "cp=2,pp=2", "context": "ring"}),
        ({"tied": True}, {"mesh": "cp=4", "context": "ulysses"}),
        ({"tied": True}, {"mesh": "pp=2,tp=2", "sequence_parallel": True}),
        ({"tied": True}, {"mesh": "tp=2", "rules": {"*.attention.*": "replicate", "3.head": "row"}}),
    ],
    "masks": [
        ({"dropout": 0.1}, {"mesh": "pp=1"}),
        ({"dropout": 0.1}, {"mesh": "dp=1,pp=2,tp=2"}),
    ],
}
"""Options of the model, and settings that change no number."""


def train(folder: Path, model: dict[str, Any], parallel: dict[str, Any], *arguments: str) -> Records:
    """Run a job; return the records of its log."""
    folder.mkdir(exist_ok=True)
    (folder / "data.py").write_text(COUNTING)
    job = {
        "model": model,
        "data": {"name": f"{folder / 'data.py'}:load"},
        "parallel": {"microbatches": 2} | parallel,
        "train": {"epochs": 1, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}, "clip": 1.0},
        "runtime": {"transport": "local", "precision": "float64"},
        "checkpoint": {"dir": str(folder)},
        "log": {"path": str(folder / "log.jsonl"), "every": 1},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    assert main(["--config", str(folder / "job.yaml"), *arguments]) == 0
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] in ("step", "epoch")]


def losses_of(records: Records) -> list[float]:
    return [record.get("validation_loss", record.get("loss")) for record in records]


@pytest.mark.parametrize("name", JOBS)
def test_jobs_train_to_the_same_losses_on_other_meshes(name: str, tmp_path: Path) -> None:
    runs = []
    for number, (options, parallel) in enumerate(JOBS[name]):
        model = {"name": "gpt", "options": {"hidden": 16, "depth": 2} | options}
        runs.append(losses_of(train(tmp_path / str(number), model, parallel)))
    assert len(runs[0]) == 5
    assert runs == [pytest.approx(runs[0], abs=1e-10)] * len(runs)


def test_a_job_trains_on_experts_that_pad_or_do_not_and_says_how_they_are_loaded(tmp_path: Path) -> None:
    padded = MOE | {"options": MOE["options"] | {"capacity_factor": 2.0, "pad_to_capacity": True}}
    alone = train(tmp_path / "alone", MOE, {"mesh": "pp=1", "microbatches": 4})
    for model in (MOE, padded):
        ranks = train(tmp_path / f"{len(model['options'])}", model, {"mesh": "ep=2,pp=2"})
        assert losses_of(ranks) == pytest.approx(losses_of(alone), abs=1e-10)
        assert [one.get("expert_tokens") for one in ranks] == [one.get("expert_tokens") for one in alone]
    steps = [one for one in alone if one["event"] == "step"]
    assert len(steps) == 4
    for one in steps:
        rows = one["expert_tokens"]
        assert list(rows) == ["1.mlp", "2.mlp"]
        assert all(sum(row) == 16 * 8 * 2 for row in rows.values()), rows
        assert one["expert_imbalance"] == max(max(row) for row in rows.values()) * 4 / (16 * 8 * 2)


def test_a_run_with_experts_that_is_resumed_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    model = MOE | {"options": MOE["options"] | {"capacity_factor": 1.0}}
    parallel, longer = {"mesh": "dp=2,ep=2", "microbatches": 1}, ("--set", "train.epochs=2")
    straight = train(tmp_path / "straight", model, parallel, *longer)
    train(tmp_path / "twice", model, parallel)
    both = train(tmp_path / "twice", model, parallel, *longer, "--resume")
    figures = ("loss", "grad_norm", "expert_tokens", "validation_loss")
    last = [[record.get(name) for name in figures] for record in straight[-5:]]
    assert [[record.get(name) for name in figures] for record in both[-5:]] == last
    assert {record["epoch"] for record in both[-5:]} == {2}
