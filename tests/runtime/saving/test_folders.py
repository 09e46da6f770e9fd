"""A folder that is replaced is there whole after a kill at any call, and the next save loses nothing."""

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from quintsched.files import folders as whole_folders
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.comm.transport_interface import SelfGroup
from quintsched.runtime.saving.atomic_folder import replace_folder, standing

from .crash import Killed, crashing, every_death

OURS = re.compile(r"weights")


def save(path: Path, text: str) -> None:
    def write(folder: Path) -> None:
        if not text:
            raise ValueError("there is nothing to write")
        (folder / "weights").write_text(text)

    everyone = ControlGroup(SelfGroup(0, torch.device("cpu")))
    replace_folder(path, "the weights", everyone, OURS, write)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_call_leaves_it_whole(can_exchange, tmp_path, monkeypatch, caplog):
    if not can_exchange:
        monkeypatch.setattr(whole_folders, "exchange", lambda one, other: False)
    (tmp_path / "begun").mkdir()
    save(tmp_path / "begun" / "out", "old")
    (tmp_path / "begun" / "out" / "notes").write_text("mine")
    for at, folder in every_death(lambda folder: save(folder / "out", "new"), tmp_path / "begun"):
        path = folder / "out"
        caplog.clear()
        found = standing(path)
        text = (found / "weights").read_text()
        assert text in ("old", "new")
        assert path.exists() or not can_exchange
        assert ("a save was killed there" in caplog.text) == (found != path)
        with crashing(at // 2 + 1), suppress(Killed):
            save(path, "next")
        assert (standing(path) / "weights").read_text() in (text, "next")
        save(path, "last")
        assert {entry.name: entry.read_text() for entry in path.iterdir()} == {"weights": "last", "notes": "mine"}
        assert os.listdir(folder) == ["out"]
    assert text == "new"
    assert at > 5


def test_a_save_that_fails_leaves_what_a_killed_one_has_left_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    save(path, "old")
    path.rename(tmp_path / "out.replaced")
    with pytest.raises(ValueError, match="nothing to write"):
        save(path, "")
    assert (path / "weights").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    save(tmp_path / "out", "new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "elsewhere" / "weights").read_text() == "new"
