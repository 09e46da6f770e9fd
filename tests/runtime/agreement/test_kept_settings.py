"""A run that is resumed goes on with its settings, or says which are others; `--override` allows one by name."""

from pathlib import Path
from typing import Any

import pytest

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.agreement.settings_on_resume import require_kept
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.train.trainer import Trainer

from ...helpers.jobs import data_file, fit, job

__all__ = ["data_file"]

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
    with pytest.raises(MisfitError, match=said):
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
    with pytest.raises(MisfitError, match=r"code\.mine\.py was .*in Python, overrides=\['code\.mine\.py'\]"):
        require_kept(also, also | {"code.mine.py": "bb"}, (), "the step")


def test_an_override_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--override train\.sed: there is no such setting; did you mean 'train\."):
        require_kept(SAVED, SAVED, ("train.sed",), "the step")


def test_a_job_that_is_resumed(data_file: Path, tmp_path: Path) -> None:
    saving = {"dir": str(tmp_path / "saved")}
    fit(job(data_file, checkpoint=saving, train={"epochs": 1}))
    other = job(data_file, checkpoint=saving, train={"epochs": 2, "clip": 2.0, "seed": 7})
    with pytest.raises(MisfitError, match=r"train\.clip was 1\.0 and is 2\.0; train\.seed was 0 and is 7; resume with"):
        fit(other, resume=True)
    with pytest.raises(MisfitError, match=r"other settings: train\.clip was 1\.0 and is 2\.0; resume with"):
        fit(other, resume=True, overrides=("train.seed",))
    _, _, said = fit(other, resume=True, overrides=("train.seed", "train.clip"))[0]
    assert any(line.startswith("resumed after step") for line in said)
    assert "resumed with another setting: train.clip was 1.0 and is 2.0" in said


def test_ranks_that_begin_in_other_ways_are_stopped(data_file: Path, tmp_path: Path) -> None:
    config = job(data_file, checkpoint={"dir": str(tmp_path / "saved")})

    def run(transport: Transport) -> None:
        Trainer.of_job(config, plan_of(config), transport).fit(resume=transport.rank == 2)

    with pytest.raises(
        MisfitError, match=r"how the run begins \(rank 2 differs from the others\): start is \"resume\""
    ):
        run_local(4, run)
