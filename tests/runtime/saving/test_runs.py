"""Runs in a folder: never two mixed or at once, the newest complete step is loaded, saves go on beside the training."""

import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quintsched as qs
from quintsched.runtime import Trainer, Transport, run_local
from quintsched.runtime.comm.clocks import now_s
from quintsched.runtime.saving import write_tensors
from quintsched.runtime.saving.checkpoints import save_and_load_checkpoints
from quintsched.runtime.saving.checkpoints.atomic_run_folder import LOCK, saved_steps
from quintsched.runtime.saving.checkpoints.background_saves import JointWrite
from quintsched.runtime.saving.checkpoints.manifest import read_manifest
from quintsched.runtime.settings.job_file import JobConfig
from quintsched.runtime.train.reporter import Reporter

from ...helpers import jobs
from ...helpers.jobs import figures, fit, interrupt_after
from .holders import PLAN, Holder, load, save


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


def test_a_save_holds_what_was_there_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, first, write = threading.Event(), torch.full((3,), 1.0), write_tensors.write_tensors
    monkeypatch.setattr(save_and_load_checkpoints, "write_tensors", lambda *given: gate.wait(20) and write(*given))

    def act(transport: Transport) -> None:
        holder: Any = Holder(PLAN, transport)
        state = {"model.0.weight": first.clone(), "tied": torch.zeros(2, 2, dtype=torch.bfloat16)}
        state |= {"same": state["model.0.weight"], "turned": torch.arange(6.0).reshape(2, 3).T, "empty": torch.empty(0)}
        holder.state_dict = lambda: dict(state)
        with save_and_load_checkpoints.Checkpoints(tmp_path, 2).opened(holder) as saves:
            saves.save_step(1, {})
            assert not list(tmp_path.glob("step-*"))
            state["model.0.weight"].fill_(2.0)
            state["turned"].zero_()
            transport.world_group()
            gate.set()
            saves.save_step(2, {})
            assert [path.name for path in tmp_path.glob("step-*")][:1] == ["step-00000001"]
        with save_and_load_checkpoints.Checkpoints(tmp_path, 2).opened(holder, "resume") as saves:
            assert saved_steps(saves.folder.directory)[-1].step == 1
            path = tmp_path / "step-00000001" / "rank-00000.safetensors"
            write_tensors.require_intact(path, read_manifest(path.with_name("manifest.json"), 1).files[0])
            tensors = load_file(path)
            assert torch.equal(tensors["model.0.weight"], first)
            assert torch.equal(tensors["same"], first)
            assert torch.equal(tensors["turned"], torch.arange(6.0).reshape(2, 3).T)
            assert tensors["empty"].shape == (0,)
            assert tensors["tied"].dtype == torch.bfloat16

    run_local(2, act)


@pytest.mark.parametrize(
    ("rank", "background", "takes_notes"), [(1, True, True), (0, True, False), (1, True, False), (1, False, False)]
)
def test_an_error_of_a_save_stops_all_ranks_with_its_words(
    data_file, tmp_path, monkeypatch, rank, background, takes_notes
):
    """In the background after a step more; at once where the disk takes no note of the error either."""
    saved = {"dir": str(tmp_path), "every": 4, "background": background}
    config = jobs.job(data_file, train={"epochs": 40 if takes_notes else 3}, checkpoint=saved)
    plan, write, say = jobs.plan_of(config), write_tensors.write_tensors, JointWrite._say

    def write_part(path: Path, *arguments: Any) -> Any:
        if path.name == f"rank-{rank:05d}.safetensors" and (not takes_notes or list(tmp_path.glob("step-*"))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *arguments)

    def say_nothing(joint: JointWrite, *arguments: Any) -> None:
        if joint.rank == rank and not takes_notes:
            raise qs.UsageError("no room for a note")
        say(joint, *arguments)

    def run(transport: Transport) -> tuple[int, str]:
        trainer = Trainer.of_job(config, plan, transport, Reporter(None, lambda _: None))
        with pytest.raises(qs.WriteError) as error:
            trainer.fit()
        return trainer.progress.step, str(error.value)

    with monkeypatch.context() as patch:
        patch.setattr(save_and_load_checkpoints, "write_tensors", write_part)
        patch.setattr(JointWrite, "_say", say_nothing)
        began = now_s()
        ((step, words),) = set(run_local(plan.mesh.size, run))
    assert now_s() - began < 60, "the patience is 300 s"
    assert (8 if takes_notes else 4) <= step < 240
    assert words.startswith(f"rank {rank}: {tmp_path}/step-")
    assert words.endswith(f"cannot write the checkpoint: {os.strerror(errno.ENOSPC)}")
    if takes_notes:
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000004"]
        assert "resumed after step 4" in fit(jobs.job(data_file, checkpoint={"dir": str(tmp_path)}), resume=True)[0][2]


@pytest.mark.parametrize(("patience_s", "asked"), [(0.2, False), (20, True)])
def test_a_rank_that_never_writes_is_not_waited_for_longer_than_patience_or_a_stop(patience_s, asked, tmp_path):
    given_up = threading.Event()
    if asked:
        given_up.set()
    joint = JointWrite(tmp_path / ".saving", tmp_path / "step-00000001", 0, 2, patience_s, given_up)
    written = write_tensors.WrittenFile(name="f", bytes=0, sha256="0" * 64)
    words = r"/step-00000001: the save was given up( after 0\.2 s)?: rank 1 has not written its part"
    with pytest.raises(qs.UsageError, match=words):
        joint.write_part(lambda attempt: written, lambda files: None)
