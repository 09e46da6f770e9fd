"""Runs in a folder: never two mixed, never two at once, and the newest complete step is loaded."""

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.saving.checkpoints.run_folder import LOCK
from quintsched.runtime.settings.job_file import JobConfig

from ...helpers import jobs
from ...helpers.jobs import figures, fit, interrupt_after
from .holders import load, save


def job(data_file: Path, folder: Path | None = None, **more: Any) -> JobConfig:
    """A job of two stages, two epochs of six steps; `more` is of its checkpoints."""
    checkpoint = {"dir": None if folder is None else str(folder)} | more
    return jobs.job(data_file, parallel={"mesh": "pp=2"}, train={"epochs": 2}, checkpoint=checkpoint)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_folder_with_steps_of_two_runs_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 3, 30.0)
    save(tmp_path / "b", 6, 60.0)
    shutil.move(tmp_path / "a" / "step-00000003", tmp_path / "b" / "step-00000003")
    with pytest.raises(qs.UsageError, match=r"the steps there are of 2 runs \((3; 6|6; 3)\); move all but one"):
        load(tmp_path / "b")


def test_a_run_that_lives_keeps_others_out_and_a_dead_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("quintsched.runtime.saving.checkpoints.folder_owner.LOCK_PATIENCE_S", 0.2)
    with (tmp_path / LOCK).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (tmp_path / LOCK).write_text('{"launch": "0", "pid": 4711, "host": "node7"}')
        with pytest.raises(qs.UsageError, match=r"another run saves its checkpoints there \(process 4711 on node7\)"):
            save(tmp_path, 6, 60.0)
        assert steps_in(tmp_path) == []
    save(tmp_path, 6, 60.0)
    assert steps_in(tmp_path) == ["step-00000006"]


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    makes: list[Callable[[Path], object]] = [lambda path: path.symlink_to(tmp_path / "no"), os.mkfifo, Path.mkdir]
    for number, make in enumerate(makes):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / LOCK)
        with pytest.raises(qs.UsageError, match="cannot write the checkpoint"):
            save(folder, 6, 60.0)
    assert not (tmp_path / "no").exists()


def test_the_newest_whole_step_is_taken_and_said_so(data_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    config = job(data_file, folder, every=3, keep=3)
    expected = figures(fit(job(data_file))[0][0])
    interrupt_after(config, steps=10)
    assert steps_in(folder) == ["step-00000003", "step-00000006", "step-00000009"]
    (folder / "step-00000009" / "rank-00001.safetensors").write_bytes(b"")
    os.truncate(folder / "step-00000006" / "manifest.json", 100)
    for history, _, said in fit(config, resume=True):
        assert re.fullmatch(
            r"the checkpoint of step 9 is not whole, step 3 is taken: \S+/step-00000009/rank-00001\.safetensors: "
            r"the file is damaged: it has 0 bytes, not the \d+ of the manifest",
            said[0],
        )
        assert said[1].startswith("the checkpoint of step 6 is not whole, step 3 is taken: ")
        assert said[2] == "resumed after step 3"
        assert figures(history) == expected
