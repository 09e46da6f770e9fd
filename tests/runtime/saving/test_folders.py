"""A folder that is replaced is there whole after a kill at any renaming, and the next save loses nothing."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quintsched.files import folders as whole_folders
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.comm.transport_interface import SelfGroup
from quintsched.runtime.saving.atomic_folder import replace_folder, standing

OURS = re.compile(r"weights")


def save(path: Path, text: str) -> None:
    def write(folder: Path) -> None:
        if not text:
            raise ValueError("there is nothing to write")
        (folder / "weights").write_text(text)

    everyone = ControlGroup(SelfGroup(0, torch.device("cpu")))
    replace_folder(path, "the weights", everyone, OURS, write)


def killed(after: int, work: Callable[[], None]) -> bool:
    """Do it in a process that ends before a renaming; return whether it came so far."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    left, rename, exchange = [after], os.rename, whole_folders.exchange

    def counted(renaming: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object, **named: object) -> object:
            if not left[0]:
                os._exit(7)
            left[0] -= 1
            return renaming(*args, **named)

        return counting

    os.rename, whole_folders.exchange = counted(rename), counted(exchange)
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_renaming_leaves_it_whole(can_exchange, tmp_path, monkeypatch, caplog):
    if not can_exchange:
        monkeypatch.setattr(whole_folders, "exchange", lambda one, other: False)
    for after in range(20):
        path = tmp_path / str(after) / "out"
        path.parent.mkdir()
        save(path, "old")
        (path / "notes").write_text("mine")
        came_so_far = killed(after, lambda path=path: save(path, "new"))
        caplog.clear()
        found = standing(path)
        assert (found / "weights").read_text() in (("old", "new") if came_so_far else ("new",))
        assert path.exists() or not can_exchange
        assert ("a save was killed there" in caplog.text) == (found != path)
        killed(1, lambda path=path: save(path, "next"))
        assert (standing(path) / "weights").read_text() in ("old", "new", "next")
        save(path, "last")
        assert {entry.name: entry.read_text() for entry in path.iterdir()} == {"weights": "last", "notes": "mine"}
        assert os.listdir(path.parent) == ["out"]
        if not came_so_far:
            return
    raise AssertionError("it never came to an end")


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
