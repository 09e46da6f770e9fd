"""Figures given to others: each with its step, from rank 0 alone, closed however the run ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintsched.errors import UsageError, WriteError
from quintsched.runtime.settings.job_file import JobConfig, SinkConfig
from quintsched.runtime.train.reporter import Reporter, require_sinks

from ...helpers.jobs import fit, launch

FILE = """
import json

class Sink:
    def __init__(self, path):
        self.path, self.lines = path, []

    def __call__(self, figures, *, step):
        self.lines.append([step, figures])

    def close(self):
        with open(self.path, "a") as file:
            file.write(json.dumps(self.lines))

def function(figures, *, step):
    print(step, sorted(figures))

number = 3
"""


def job(tmp_path: Path, *sinks: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"options": {"hidden": 8, "depth": 2, "heads": 2}},
            "parallel": {"mesh": "pp=2"},
            "train": {"batch_size": 512},
            "log": {"path": str(tmp_path / "log.jsonl"), "every": 1, "sinks": list(sinks)},
        }
    )


def test_a_users_class_is_given_what_the_log_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    sink = {"name": f"{tmp_path / 'mine.py'}:Sink", "options": {"path": str(tmp_path / "figures")}}
    fit(job(tmp_path, sink))
    taken = json.loads((tmp_path / "figures").read_text())
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()][1:-1]
    assert [step for step, _ in taken] == [record["step"] for record in logged] == [1, 2, 3, 3]
    assert [figures.get("train/loss") for _, figures in taken[:3]] == [record["loss"] for record in logged[:3]]
    assert taken[3][1]["epoch/validation_loss"] == logged[3]["validation_loss"]
    assert "train/event" not in taken[0][1]


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(job(tmp_path, {"name": "tensorboard", "options": {"log_dir": str(tmp_path / "board")}}))
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3]
    assert "epoch/validation_accuracy" in found.Tags()["scalars"]


def test_what_is_not_there_is_said_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quintsched.runtime.train.reporter.find_spec", lambda name: None)
    (tmp_path / "mine.py").write_text(FILE)
    for name, options, message in (
        ("wandb", {}, "'wandb' needs the package wandb, which is not installed; pip install wandb"),
        ("mine.py:number", {}, "is a int, not a function or a class"),
        ("mine.py:function", {"a": 1}, "nothing to build with options"),
    ):
        with pytest.raises(UsageError, match=message):
            require_sinks([SinkConfig(name=name, options=options)])
    assert launch({"log": {"sinks": ["tensorbord"]}}) == 2
    assert "log.sinks: there is no sink 'tensorbord'; did you mean 'tensorboard'?" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_log_that_cannot_be_written_ends_a_run_in_one_line() -> None:
    reporter = Reporter("/dev/full", lambda _: None)
    with pytest.raises(WriteError, match="/dev/full: cannot write the log: No space left on device"), reporter:
        reporter.write_record({"event": "step"})
