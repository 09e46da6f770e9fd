"""A save that dies at any system call, or whose process is killed, leaves the step before or the new one, whole.

So does a folder that is replaced, as those of exported weights are.
"""

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from quintsched.files import folders
from quintsched.runtime import JobConfig, Trainer, connect_for, plan_of
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.comm.transport_interface import SelfGroup
from quintsched.runtime.saving.atomic_output_folder import replace_folder, standing
from quintsched.runtime.saving.checkpoints.atomic_run_folder import LOCK
from quintsched.runtime.saving.checkpoints.folder_owner import COSTS
from quintsched.runtime.settings.allowed_setting_values import Start

from ...helpers.jobs import fit, job
from ..ranks import run_ranks
from .crash import Killed, crashing, every_death
from .holders import load, on_ranks, opened, save

STEP = "step-00000004"


def found_in(folder: Path) -> tuple[int, float] | None:
    loaded = load(folder)
    return None if loaded is None else (loaded.step, loaded.number)


def two_steps(folder: Path) -> None:
    save(folder, 1, 10.0)
    save(folder, 2, 20.0, keep=2)


def damaged_steps(folder: Path) -> None:
    for step in (2, 4, 6):
        save(folder, step, 10.0 * step, keep=9)
    for step in (4, 6):
        os.truncate(folder / f"step-{step:08d}" / "rank-00001.safetensors", 3)


def a_killed_save(folder: Path) -> None:
    save(folder, 2, 20.0)
    with crashing(20), pytest.raises(Killed):
        save(folder, 3, 30.0)
    assert any(path.name.startswith(".saving-") for path in folder.iterdir())


SITUATIONS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "nothing": (Path.mkdir, {}),
    "an older step": (lambda folder: save(folder, 2, 20.0), {}),
    "two steps": (two_steps, {"keep": 2}),
    "the same step": (lambda folder: save(folder, 4, 20.0), {}),
    "damaged steps": (damaged_steps, {}),
    "a killed save": (a_killed_save, {}),
    "an older step, in the background": (lambda folder: save(folder, 2, 20.0), {"background": True}),
}
"""Folder when a save begins, and the way of saving."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("there", "can_exchange"), [*((name, True) for name in SITUATIONS), ("the same step", False)])
def test_a_save_that_dies_at_any_call_leaves_a_whole_step(there, can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    begun, seen = tmp_path / "begun", set()
    begin, how = SITUATIONS[there]
    begin(begun)
    before = found_in(begun)
    for at, folder in every_death(lambda folder: save(folder, 4, 40.0, **how), begun):
        assert (folder / STEP).is_dir() or there != "the same step" or not can_exchange, at
        found = found_in(folder)
        assert found in (before, (4, 40.0)), at
        seen.add(found)
        save(folder, 5, 50.0)
        assert found_in(folder) == (5, 50.0)
        left = {path.name for path in folder.iterdir() if not path.name.startswith("set-aside-")}
        assert left == {LOCK, "plan.json", "step-00000005"}, at
    assert seen == {before, (4, 40.0)}
    assert at > 20


def test_an_old_run_that_is_moved_away_is_never_lost(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    for step in (2, 4):
        save(begun, step, 10.0 * step, keep=9)
    (begun / COSTS).write_text("[1.0]")
    files = {(path.parent.name, path.name): path.read_bytes() for path in begun.glob("step-*/*")}
    for _, folder in every_death(open_fresh, begun, halves=False):
        there = {(path.parent.name, path.name): path.read_bytes() for path in folder.glob("**/step-*/*")}
        assert there == files
        open_fresh(folder)
        (home,) = folder.glob("run-*")
        assert sorted(path.name for path in home.iterdir()) == [COSTS, "plan.json", "step-00000002", "step-00000004"]
        assert found_in(home) == (4, 40.0)
        assert found_in(folder) is None


def open_fresh(folder: Path) -> None:
    def act(holder: Any) -> None:
        with opened(holder, folder, start="fresh"):
            pass

    on_ranks(act)


RANKS = 2


def train(config: str, start: Start, out: str, victim: int, at: int | None) -> None:
    """Train as one rank; the victim kills itself at a call that changes files."""
    settings, rank = JobConfig.model_validate_json(config), int(os.environ["RANK"])
    plan = plan_of(settings)
    os.chdir(out)  # where the report of who died goes

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        trainer = Trainer.of_job(settings, plan, connect_for(plan, 60, "gloo", None))
        with crashing(at if rank == victim else None, halves=bool((at or 0) % 2), end=die):
            trainer.fit(start)
        torch.save(trainer.engine.full_weights(), f"{rank}.pt")
    except BaseException:
        os._exit(4)
    os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "at"), [(0, 18), *(pytest.param(1, at, marks=pytest.mark.slow) for at in (7, 28))])
def test_a_rank_that_is_killed_in_a_save(data_file: Path, tmp_path: Path, victim: int, at: int) -> None:
    """At a call that changes files, of more than 30 that four saves make."""
    parts: dict[str, Any] = {"parallel": {"mesh": "pp=2"}, "train": {"epochs": 2}, "runtime": {"timeout_s": 5.0}}
    config = job(data_file, checkpoint={"dir": str(tmp_path / "saved"), "every": 4}, **parts)

    def run(start: Start, victim: int = -1, at: int | None = None) -> list[int | None]:
        return run_ranks(train, RANKS, config.model_dump_json(exclude_unset=True), start, str(tmp_path), victim, at)

    assert run("new", victim, at)[victim] == -signal.SIGKILL
    assert run("resume") == [0] * RANKS
    for rank, (_, weights, _) in enumerate(fit(job(data_file, **parts))):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert not list((tmp_path / "saved").glob(".*"))


OURS = re.compile(r"weights")


def write(path: Path, text: str) -> None:
    def write_text(folder: Path) -> None:
        if not text:
            raise ValueError("there is nothing to write")
        (folder / "weights").write_text(text)

    everyone = ControlGroup(SelfGroup(0, torch.device("cpu")))
    replace_folder(path, "the weights", everyone, OURS, write_text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_call_leaves_it_whole(can_exchange, tmp_path, monkeypatch, caplog):
    if not can_exchange:
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    (tmp_path / "begun").mkdir()
    write(tmp_path / "begun" / "out", "old")
    (tmp_path / "begun" / "out" / "notes").write_text("mine")
    for at, folder in every_death(lambda folder: write(folder / "out", "new"), tmp_path / "begun"):
        path = folder / "out"
        caplog.clear()
        found = standing(path)
        text = (found / "weights").read_text()
        assert text in ("old", "new")
        assert path.exists() or not can_exchange
        assert ("a save was killed there" in caplog.text) == (found != path)
        with crashing(at // 2 + 1), suppress(Killed):
            write(path, "next")
        assert (standing(path) / "weights").read_text() in (text, "next")
        write(path, "last")
        assert {entry.name: entry.read_text() for entry in path.iterdir()} == {"weights": "last", "notes": "mine"}
        assert os.listdir(folder) == ["out"]
    assert text == "new"
    assert at > 5


def test_a_save_that_fails_leaves_what_a_killed_one_has_left_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write(path, "old")
    path.rename(tmp_path / "out.replaced")
    with pytest.raises(ValueError, match="nothing to write"):
        write(path, "")
    assert (path / "weights").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    write(tmp_path / "out", "new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "elsewhere" / "weights").read_text() == "new"
