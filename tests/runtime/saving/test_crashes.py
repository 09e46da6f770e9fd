"""A save that dies at any system call leaves the step before or the new one, whole; the next save clears the rest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import quintsched as qs
from quintsched.files import folders
from quintsched.files.folders import exchange
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.saving.checkpoints.checkpoints import Checkpoints
from quintsched.runtime.saving.checkpoints.folder_owner import COSTS, LOCK

from .crash import Killed, crashing
from .test_manifest import Holder

STEP = "step-00000004"
PLAN = qs.compile("1f1b", mesh="pp=2", microbatches=2)


class Counter(Holder):
    """Holds a number that tells apart saves, and ranks."""

    def __init__(self, plan: qs.Plan, transport: Transport, number: float) -> None:
        super().__init__(plan, transport)
        self.number = number

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"model.0.weight": torch.full((3,), self.number), "step": torch.tensor(self.transport.rank)}


def save(folder: Path, step: int, number: float, keep: int = 1, *, background: bool = False) -> None:
    def act(transport: Transport) -> None:
        engine = cast(Engine, Counter(PLAN, transport, number))
        with Checkpoints(folder, keep, background).opened(engine.saves, "resume") as saves:
            saves.save(step, {"number": number})

    run_local(PLAN.mesh.size, act)


def load(folder: Path) -> tuple[int, float] | None:
    """Return the newest step that is whole and its number, which both ranks have."""

    def act(transport: Transport) -> tuple[int, float] | None:
        holder = Counter(PLAN, transport, 0.0)
        with Checkpoints(folder, 1).opened(cast(Any, holder), "resume") as saves:
            found = saves.newest_whole()
            if found is None:
                return None
            found.load()
        number: float = found.manifest.progress["number"]
        assert torch.equal(holder.loaded["model.0.weight"], torch.full((3,), number))
        assert int(holder.loaded["step"]) == transport.rank
        return found.step, number

    first, second = run_local(PLAN.mesh.size, act)
    assert first == second
    return first


def nothing(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {}


def an_older_step(folder: Path) -> dict[str, Any]:
    save(folder, 2, 20.0)
    return {}


def two_steps(folder: Path) -> dict[str, Any]:
    save(folder, 1, 10.0)
    save(folder, 2, 20.0, keep=2)
    return {"keep": 2}


def the_same_step(folder: Path) -> dict[str, Any]:
    save(folder, 4, 20.0)
    return {}


def damaged_steps(folder: Path) -> dict[str, Any]:
    for step in (2, 4, 6):
        save(folder, step, 10.0 * step, keep=9)
    for step in (4, 6):
        os.truncate(folder / f"step-{step:08d}" / "rank-00001.safetensors", 3)
    return {}


def a_killed_save(folder: Path) -> dict[str, Any]:
    save(folder, 2, 20.0)
    with crashing(20), pytest.raises(Killed):
        save(folder, 3, 30.0)
    assert any(path.name.startswith(".saving-") for path in folder.iterdir())
    return {}


def an_older_step_in_the_background(folder: Path) -> dict[str, Any]:
    save(folder, 2, 20.0)
    return {"background": True}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    "there",
    [nothing, an_older_step, two_steps, the_same_step, damaged_steps, a_killed_save, an_older_step_in_the_background],
)
def test_a_save_that_dies_at_any_call_leaves_a_whole_step(
    there: Callable[[Path], dict[str, Any]], halves: bool, tmp_path: Path
) -> None:
    die_at_every_call(there, halves, tmp_path)


def test_nor_is_a_step_lost_where_folders_cannot_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    die_at_every_call(the_same_step, False, tmp_path)


def die_at_every_call(there: Callable[[Path], dict[str, Any]], halves: bool, tmp_path: Path) -> None:
    begun, folder = tmp_path / "begun", tmp_path / "run"
    how = there(begun)
    before = load(begun)
    seen, at, died = set(), 0, True
    while died:
        at += 1
        shutil.copytree(begun, folder)
        died = dies(at, halves=halves, act=lambda: save(folder, 4, 40.0, **how))
        assert (folder / STEP).is_dir() or there is not the_same_step or folders.exchange is not exchange, at
        found = load(folder)
        assert found in (before, (4, 40.0)), at
        seen.add(found)
        save(folder, 5, 50.0)
        assert load(folder) == (5, 50.0)
        left = {path.name for path in folder.iterdir() if not path.name.startswith("set-aside-")}
        assert left == {LOCK, "plan.json", "step-00000005"}, at
        shutil.rmtree(folder)
    assert seen == {before, (4, 40.0)}
    assert at > 20


def test_an_old_run_that_is_moved_away_is_never_lost(tmp_path: Path) -> None:
    begun, folder = tmp_path / "begun", tmp_path / "run"
    for step in (2, 4):
        save(begun, step, 10.0 * step, keep=9)
    (begun / COSTS).write_text("[1.0]")
    files = {(path.parent.name, path.name): path.read_bytes() for path in begun.glob("step-*/*")}
    at, died = 0, True
    while died:
        at += 1
        shutil.copytree(begun, folder)
        died = dies(at, halves=False, act=lambda: open_fresh(folder))
        there = {(path.parent.name, path.name): path.read_bytes() for path in folder.glob("**/step-*/*")}
        assert there == files
        open_fresh(folder)
        (home,) = folder.glob("run-*")
        assert sorted(path.name for path in home.iterdir()) == [COSTS, "plan.json", "step-00000002", "step-00000004"]
        assert load(home) == (4, 40.0)
        assert load(folder) is None
        shutil.rmtree(folder)
    assert at > 5


def open_fresh(folder: Path) -> None:
    def act(transport: Transport) -> None:
        with Checkpoints(folder, 1).opened(cast(Any, Counter(PLAN, transport, 0.0)), "fresh"):
            pass

    run_local(PLAN.mesh.size, act)


def dies(at: int, *, halves: bool, act: Callable[[], None]) -> bool:
    """Return whether something ended at its `at`-th call."""
    with crashing(at, halves=halves) as crash:
        try:
            act()
        except Killed:
            assert crash.is_dead
        return crash.is_dead
