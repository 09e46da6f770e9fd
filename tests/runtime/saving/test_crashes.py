"""A save that dies at any system call, or whose process is killed, leaves the step before or the new one, whole."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quintsched.files import folders
from quintsched.files.folders import exchange
from quintsched.runtime.comm.choose_transport import connect_for
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.saving.checkpoints.folder_owner import COSTS
from quintsched.runtime.saving.checkpoints.run_folder import LOCK
from quintsched.runtime.settings.engine_and_job_settings import Start
from quintsched.runtime.settings.job_file import JobConfig
from quintsched.runtime.train.trainer import Trainer

from ...helpers.jobs import data_file, job
from ..ranks import run_ranks
from .crash import Killed, crashing
from .holders import load, on_ranks, opened, save

__all__ = ["data_file"]

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
@pytest.mark.parametrize("there", SITUATIONS)
def test_a_save_that_dies_at_any_call_leaves_a_whole_step(there: str, tmp_path: Path) -> None:
    die_at_every_call(there, tmp_path)


def test_nor_is_a_step_lost_where_folders_cannot_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    die_at_every_call("the same step", tmp_path)


def die_at_every_call(there: str, tmp_path: Path) -> None:
    begun, folder = tmp_path / "begun", tmp_path / "run"
    begin, how = SITUATIONS[there]
    begin(begun)
    before = found_in(begun)
    seen, at, died = set(), 0, True
    while died:
        at += 1
        shutil.copytree(begun, folder)
        died = dies(at, halves=bool(at % 2), act=lambda: save(folder, 4, 40.0, **how))
        assert (folder / STEP).is_dir() or there != "the same step" or folders.exchange is not exchange, at
        found = found_in(folder)
        assert found in (before, (4, 40.0)), at
        seen.add(found)
        save(folder, 5, 50.0)
        assert found_in(folder) == (5, 50.0)
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
        assert found_in(home) == (4, 40.0)
        assert found_in(folder) is None
        shutil.rmtree(folder)
    assert at > 5


def open_fresh(folder: Path) -> None:
    def act(holder: Any) -> None:
        with opened(holder, folder, start="fresh"):
            pass

    on_ranks(act)


def dies(at: int, *, halves: bool, act: Callable[[], None]) -> bool:
    """Return whether something ended at its `at`-th call."""
    with crashing(at, halves=halves) as crash:
        try:
            act()
        except Killed:
            assert crash.is_dead
        return crash.is_dead


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
        with crashing(at if rank == victim else None, halves=bool((at or 0) % 2), end=die) as crash:
            trainer.fit(start)
        weights = trainer.engine.full_weights()
    except BaseException:
        os._exit(4)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().numpy().tobytes())
    Path(out, f"{rank}.json").write_text(json.dumps([digest.hexdigest(), crash.count]))
    os._exit(0)


def run(config: JobConfig, start: Start, out: Path, victim: int = -1, at: int | None = None) -> list[int | None]:
    out.mkdir(exist_ok=True)
    return run_ranks(train, RANKS, config.model_dump_json(exclude_unset=True), start, str(out), victim, at)


def results(out: Path) -> list[Any]:
    """Return the digest of each rank's weights, and its calls that change files."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rank", "share"), [(0, 0.5), *(pytest.param(1, share, marks=pytest.mark.slow) for share in (0.2, 0.8))]
)
def test_a_rank_that_is_killed_in_a_save(data_file: Path, tmp_path: Path, rank: int, share: float) -> None:
    """At a call that changes files, of all that four saves make."""

    def config_of(folder: str) -> JobConfig:
        saved = {"dir": str(tmp_path / folder), "every": 4}
        more: dict[str, Any] = {"parallel": {"mesh": "pp=2"}, "train": {"epochs": 2}, "runtime": {"timeout_s": 5.0}}
        return job(data_file, checkpoint=saved, **more)

    whole = tmp_path / "whole"
    assert run(config_of("unkilled"), "new", whole) == [0] * RANKS
    _, calls = results(whole)[rank]
    assert calls > 30
    config = config_of("saved")
    assert run(config, "new", tmp_path / "killed", rank, round(calls * share))[rank] == -signal.SIGKILL
    assert run(config, "resume", tmp_path / "resumed") == [0] * RANKS
    digests, expected = ([digest for digest, _ in results(out)] for out in (tmp_path / "resumed", whole))
    assert digests == expected
    assert not list((tmp_path / "saved").glob(".*"))
