"""A small training job: its data, its job file, its run on all ranks of this process, and what runs are compared by."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quintsched.runtime import JobConfig, Trainer, Transport, plan_of, run_local
from quintsched.runtime.launch.worker import main
from quintsched.runtime.settings.allowed_setting_values import Start
from quintsched.runtime.train.reporter import Reporter

from . import commands

DATA = commands.DATA.replace("train=75, validation=20", "train=45, validation=19")
"""Data file of images; of two sizes, of which neither divides into batches."""

COUNTING = """
import numpy as np
from quintsched.runtime.data import Dataset, Split

def load():
    ids = (np.arange(96)[:, None] + np.arange(9)) % 16
    split = lambda part: Split(inputs=part[:, :-1].astype(np.int64), targets=part[:, 1:].astype(np.int64))
    return Dataset(name="counting", train=split(ids[:64]), validation=split(ids[64:]), num_classes=16)
"""
"""Data file of sequences that count."""


Sections = Mapping[str, Mapping[str, Any]]
LOCAL: Sections = {"runtime": {"transport": "local", "precision": "float64"}}
LOGGED: Sections = {"log": {"path": "log.jsonl", "every": 1}}


def joined(*jobs: Sections) -> dict[str, dict[str, Any]]:
    """Return the sections of all jobs, in each the keys of all, those of the last one before others."""
    found: dict[str, dict[str, Any]] = {}
    for one in jobs:
        found |= {name: {**found.get(name, {}), **section} for name, section in one.items()}
    return found


def launch(*sections: Sections, arguments: tuple[str, ...] = ()) -> int:
    """Run a job in the current directory, all its ranks in this process, by its command; return its exit code."""
    Path("job.yaml").write_text(json.dumps(joined(LOCAL, *sections)))
    return main(["--config", "job.yaml", *arguments])


def write_job(folder: Path, model: str, *sections: Sections) -> Path:
    """Write a short job whose model and images are files beside it; return its path."""
    (folder / "data.py").write_text(commands.DATA)
    (folder / "model.py").write_text(model)
    own: Sections = {
        "model": {"name": f"{folder}/model.py:build"},
        "data": {"name": f"{folder}/data.py:load"},
        "train": {"epochs": 1, "batch_size": 16},
        "runtime": {"timeout_s": 60},
    }
    (folder / "job.yaml").write_text(json.dumps(joined(own, *sections)))
    return folder / "job.yaml"


def run_job(*sections: Sections, arguments: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Run a job in the current directory; return the records of its steps and epochs."""
    Path("log.jsonl").unlink(missing_ok=True)
    assert launch(LOGGED, *sections, arguments=arguments) == 0
    records = map(json.loads, Path("log.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] in ("step", "epoch")]


def losses_of(records: list[dict[str, Any]]) -> list[float]:
    """Return the loss of each step, and behind each epoch that of the validation, if there is one."""
    return [
        record["loss"] if record.get("validation_loss") is None else record["validation_loss"] for record in records
    ]


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    path = tmp_path / "steps.py"
    path.write_text(DATA)
    return path


def job(data_file: Path, **sections: dict[str, Any]) -> JobConfig:
    usual: Sections = {
        "model": {"options": {"hidden": 8, "depth": 2, "heads": 2}},
        "data": {"name": f"{data_file}:load"},
        "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2},
        "train": {"epochs": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 3e-3}, "clip": 1.0},
    }
    return JobConfig.model_validate(joined(usual, sections))


def fit(
    config: JobConfig, *, resume: bool = False, fresh: bool = False, asked: tuple[int, int] | None = None, **more: Any
) -> list[tuple[list[dict[str, Any]], dict[str, Tensor], list[str]]]:
    """Train on all ranks; return of each its records of epochs, its weights, and what it has said.

    `asked`: a rank, and the step in which it is asked to stop, from 1 on.
    """
    plan = plan_of(config)

    def run(transport: Transport) -> tuple[list[dict[str, Any]], dict[str, Tensor], list[str]]:
        said, begun, is_asked = list[str](), list[object](), asked is not None and transport.rank == asked[0]
        reporter = Reporter(config.log.path if transport.rank == 0 else None, said.append)
        wants = {"wants_stop": lambda: is_asked and len(begun) >= asked[1]}
        trainer = Trainer.of_job(config, plan, transport, reporter, **wants, **more)
        step = trainer.engine.step
        trainer.engine.step = lambda *given, **extras: begun.append(step) or step(*given, **extras)
        history = trainer.fit("resume" if resume else "fresh" if fresh else "new")
        return history, trainer.engine.full_weights(), said

    return run_local(plan.mesh.size, run)


def figures(history: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    names = ("epoch", "step", "loss", "accuracy", "validation_loss", "validation_accuracy")
    return [tuple(record[name] for name in names) for record in history]


def interrupt_after(config: JobConfig, steps: int, start: Start = "new") -> None:
    plan = plan_of(config)

    class Interrupted(Exception):
        pass

    def run(transport: Transport) -> None:
        trainer = Trainer.of_job(config, plan, transport)
        step = trainer.engine.step

        def interrupted_step(*batch: Tensor | None) -> Any:
            if trainer.progress.step == steps:
                raise Interrupted
            return step(*batch)

        trainer.engine.step = interrupted_step  # type: ignore[method-assign, assignment]
        trainer.fit(start)

    with pytest.raises(Interrupted):
        run_local(plan.mesh.size, run)
