"""Ranks that were started with other settings, code, values or data are named with what differs, before training.

A run that is resumed goes on with its settings, or says which are others; `--override` allows one by name.
"""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, JobConfig, Trainer, Transport, load_job, plan_of, run_local
from quintsched.runtime.agreement.job_fingerprint_between_ranks import code_settings, job_settings
from quintsched.runtime.agreement.refuse_unequal_ranks import Record, Section, require_same
from quintsched.runtime.agreement.settings_on_resume import require_kept
from quintsched.runtime.data import Dataset, Split
from quintsched.runtime.train import batch_feed

from ...helpers.jobs import data_file, fit, job
from ...helpers.refusals import refusals
from ..toys import sgd, tiny_vit

__all__ = ["data_file"]

mse = nn.functional.mse_loss


def compared(records: list[Record | None]) -> str:
    def run(transport: Transport) -> None:
        record = records[transport.rank]
        said = None if record is None else Section.from_settings(record)
        require_same({"some": said}, transport.world_group(), "the weather", "look outside")

    (words,) = set(refusals(len(records), run))
    return words


def test_the_odd_rank_is_named_with_what_differs() -> None:
    sun: Record = {"sky": "blue", "wind": 3}
    assert compared([sun, sun, {"sky": "grey", "wind": 3}, sun]) == (
        "the ranks do not agree on the weather (rank 2 differs from the others): "
        'sky is "grey" on rank 2, but "blue" on ranks 0, 1 and 3; look outside'
    )
    assert "(ranks 1 and 2 differ from the others): sky is" in compared(
        [sun, {**sun, "sky": 1}, {**sun, "sky": 2}, *[sun] * 3]
    )
    assert "wind is not there on rank 1, but 3 on ranks 0 and 2" in compared([sun, {"sky": "blue"}, sun])


JOB = """
model: {options: {hidden: 8, depth: 2, heads: 2}}
parallel: {mesh: "dp=2,pp=2", microbatches: 2}
train: {epochs: 2, batch_size: 8, clip: 1.0}
"""

SETTINGS = """
train.seed=1 train.epochs=3 train.batch_size=16 train.accumulate=2 train.clip=2.0 train.patience=3 train.max_skipped=2
train.optimizer.lr=2e-3 train.optimizer.name=adamw train.optimizer.weight_decay=0.1 train.optimizer.decay=matrices
train.optimizer.betas=[0.8,0.9] train.lr_schedule.name=cosine train.lr_schedule.warmup_steps=3
model.options.dropout=0.1 model.options.hidden=16 model.name=gpt data.name=text
parallel.microbatches=4 parallel.schedule=gpipe parallel.mesh='dp=4,pp=1' parallel.zero=1 parallel.recompute=1
parallel.bucket_mb=1.0 parallel.buffers=first parallel.zero_split=parameter
runtime.precision=float64 runtime.compile=true runtime.verify=true checkpoint.dir=out checkpoint.every=3 log.every=7
"""
"""Each of which one rank has, and the others have not."""


def job_at(folder: Path, overrides: list[str] = []) -> JobConfig:  # noqa: B006
    path = folder / "job.yaml"
    path.write_text(JOB)
    return load_job(path, overrides)


def why_no_trainers(job_of: Callable[[int], JobConfig]) -> str:
    """Return why all of four ranks refuse to train, each by its job."""
    jobs = [job_of(rank) for rank in range(4)]
    (words,) = set(refusals(4, lambda one: Trainer.of_job(jobs[one.rank], plan_of(jobs[one.rank]), one)))
    return words


@pytest.mark.sampled(1)
@pytest.mark.parametrize("odd", SETTINGS.split())
def test_no_odd_setting_trains_on_in_silence(tmp_path: Path, odd: str) -> None:
    words = why_no_trainers(lambda rank: job_at(tmp_path, [odd] if rank == 2 else []))
    assert "(rank 2 differs from the others)" in words
    assert f"{odd.partition('=')[0]} is " in words
    assert " on rank 2, but " in words


def test_other_code_of_the_users_is_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "mine.py").write_text(f"NUMBER = {number}\n")
    jobs = [JobConfig.model_validate({"model": {"name": f"{folder}/mine.py:build"}}) for folder in folders]
    assert job_settings(jobs[0]) == job_settings(jobs[1])  # where a file lies is a matter of its machine
    first, second = map(code_settings, jobs)
    assert {name for name in first if first[name] != second[name]} == {"code.mine.py"}
    assert {"code.python", "code.torch", "code.quintsched"} < first.keys()


def plan_of_three(schedule: str) -> qs.Plan:
    return qs.compile(schedule, mesh="pp=3", microbatches=2)


def engine(transport: Transport, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "plan": plan_of_three("1f1b"),
        "blocks": tiny_vit(),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": functools.partial(torch.optim.Adam, lr=1e-3),
    }
    Engine(transport=transport, **(settings | (changes if transport.rank == 1 else {})))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"plan": plan_of_three("gpipe")}, 'plan.schedule.name is "gpipe" on rank 1, but "1f1b"'),
        ({"clip": 1.0}, "engine.clip is 1.0 on rank 1, but null on ranks 0 and 2"),
        ({"seed": 1}, "engine.seed is 1 on rank 1"),
        ({"dtype": torch.float64}, 'engine.dtype is "torch.float64" on rank 1'),
        ({"bucket_mb": 1.0}, "engine.bucket_mb"),
        ({"metrics": {"mine": mse}}, "engine.metrics"),
        ({"blocks": tiny_vit(3)}, "engine.blocks is 5 on rank 1, but 6"),
        ({"blocks": [*tiny_vit()[:-1], functools.partial(nn.Linear, 16, 11)]}, "block 5"),
        ({"optimizer": functools.partial(torch.optim.Adam, lr=1e-2)}, "optimizer.lr is 0.01 on rank 1, but 0.001"),
        ({"optimizer": functools.partial(torch.optim.Adam, betas=(0.5, 0.9))}, "optimizer.betas"),
        ({"optimizer": sgd}, 'optimizer is "SGD" on rank 1, but "Adam"'),
    ],
)
def test_engines_that_differ_are_stopped(changes: dict[str, Any], named: str) -> None:
    (words,) = set(refusals(3, lambda transport: engine(transport, **changes)))
    assert "(rank 1 differs from the others)" in words
    assert named in words


def dataset(samples: int, shift: float = 0.0, width: int = 8) -> Dataset:
    def split(count: int) -> Split:
        inputs = np.full((count, 1, width, width), shift, dtype=np.float32)
        return Split(inputs=inputs, targets=np.arange(count) % 4)

    return Dataset(name="toy", train=split(samples), validation=split(8), num_classes=4)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (dataset(30), "data.training_samples is 30 on rank 1, but 32 on ranks 0, 2 and 3"),
        (dataset(32, 1.0), "data.training_digest"),
        (dataset(32, width=4), "data.input_shape"),
    ],
)
def test_data_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: Dataset, named: str) -> None:
    name = threading.current_thread  # which is that of its rank
    monkeypatch.setattr(batch_feed, "load_dataset", lambda *_: odd if name().name == "rank1" else dataset(32))
    words = why_no_trainers(lambda _: job_at(tmp_path))
    assert "the ranks do not agree on the data (rank 1 differs from the others)" in words
    assert named in words


SAVED = {
    "train.optimizer.lr": 0.1,
    "train.seed": 0,
    "train.epochs": 2,
    "code.torch": "2.12",
    "code.mine.py": "aa",
    "runtime.precision": "float32",
    "parallel.mesh": "dp=2",
    "model.options.depth": 2,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.optimizer.lr", 0.2),
        ("train.seed", 1),
        ("code.mine.py", "bb"),
        ("runtime.precision", "float64"),
        ("model.options.depth", 3),
        ("model.options.tied", True),
    ],
)
def test_other_settings_are_refused_by_name(name: str, value: Any) -> None:
    now = SAVED | {name: value}
    said = rf"the step was written with other settings: {name} was .* and is (.|\n)*--override {name}"
    with pytest.raises(qs.MisfitError, match=said):
        require_kept(SAVED, now, (), "the step")
    for override in (name, name.rpartition(".")[0], name.partition(".")[0]):
        (said,) = require_kept(SAVED, now, (override,), "the step")
        assert said.startswith(f"resumed with another setting: {name} was ")


@pytest.mark.parametrize("name", ["train.epochs", "parallel.mesh", "log.every", "model.pretrained", "train.accumulate"])
def test_what_does_not_change_what_is_learnt_is_free(name: str) -> None:
    assert require_kept(SAVED, SAVED | {name: "other"}, (), "the step") == []


def test_code_is_free_where_only_free_settings_name_it() -> None:
    own = {"parallel.schedule": "mine.py:order", "code.mine.py": "aa"}
    before = SAVED | {"parallel.schedule": "1f1b"}
    del before["code.mine.py"]
    assert require_kept(before, before | own, (), "the step") == []
    assert require_kept(before | own, before, (), "the step") == []
    assert require_kept(before | own, before | own | {"code.mine.py": "bb"}, (), "the step") == []
    also = before | own | {"model.name": "mine.py:build"}
    with pytest.raises(qs.MisfitError, match=r"code\.mine\.py was .*in Python, overrides=\['code\.mine\.py'\]"):
        require_kept(also, also | {"code.mine.py": "bb"}, (), "the step")


def test_an_override_of_nothing_is_refused() -> None:
    with pytest.raises(qs.UsageError, match=r"--override train\.sed: there is no such setting; did you mean 'train\."):
        require_kept(SAVED, SAVED, ("train.sed",), "the step")


def test_a_job_that_is_resumed(data_file: Path, tmp_path: Path) -> None:
    saving = {"dir": str(tmp_path / "saved")}
    fit(job(data_file, checkpoint=saving, train={"epochs": 1}))
    other = job(data_file, checkpoint=saving, train={"epochs": 2, "clip": 2.0, "seed": 7})
    with pytest.raises(
        qs.MisfitError, match=r"train\.clip was 1\.0 and is 2\.0; train\.seed was 0 and is 7; resume with"
    ):
        fit(other, resume=True)
    with pytest.raises(qs.MisfitError, match=r"other settings: train\.clip was 1\.0 and is 2\.0; resume with"):
        fit(other, resume=True, overrides=("train.seed",))
    _, _, said = fit(other, resume=True, overrides=("train.seed", "train.clip"))[0]
    assert any(line.startswith("resumed after step") for line in said)
    assert "resumed with another setting: train.clip was 1.0 and is 2.0" in said


def test_ranks_that_begin_in_other_ways_are_stopped(data_file: Path, tmp_path: Path) -> None:
    config = job(data_file, checkpoint={"dir": str(tmp_path / "saved")})

    def run(transport: Transport) -> None:
        Trainer.of_job(config, plan_of(config), transport).fit(resume=transport.rank == 2)

    with pytest.raises(
        qs.MisfitError, match=r"how the run begins \(rank 2 differs from the others\): start is \"resume\""
    ):
        run_local(4, run)
