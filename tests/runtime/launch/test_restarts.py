"""A rank is killed, the run is started again, goes on from its last checkpoint and ends with the same figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quintsched.errors import UsageError
from quintsched.runtime.comm import run_local
from quintsched.runtime.launch import worker
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.settings.job_file import load_job
from quintsched.runtime.settings.run_settings import Start
from quintsched.runtime.train.trainer import Trainer
from quintsched.runtime.watch.rendezvous.addresses import LOOPBACK, listen
from quintsched.runtime.watch.rendezvous.rendezvous_store import serve

from ...helpers.commands import run, write_job
from .killed_job import JOB, MODEL


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "quintsched"])
def test_a_killed_rank_is_started_again_and_the_run_goes_on_from_the_last_step(tmp_path: Path, launcher: str) -> None:
    file = write_job(tmp_path, JOB, MODEL)
    ways = {
        "torchrun": ("torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "-m", "quintsched.runtime"),
        "quintsched": ("quintsched.runtime.launch.local_run", "--restarts", "1"),
    }
    log, saved = tmp_path / "log.jsonl", tmp_path / "saved"
    settings = [f"log.path={log}", f"checkpoint.dir={saved}"]
    (tmp_path / "fuse").touch()
    given = [argument for setting in settings for argument in ("--set", setting)]
    code, out, err = run(sys.executable, "-m", *ways[launcher], "--config", file, *given)
    assert code == 0, err
    assert not (tmp_path / "fuse").exists()
    assert re.search("resumed after step [46]$", out, re.MULTILINE)  # step 6 may still have been on its way to the disk

    job = load_job(file)
    plan = plan_of(job)
    expected = run_local(2, lambda transport: Trainer.of_job(job, plan, transport).fit())[0][-1]
    found = [r for r in map(json.loads, log.read_text().splitlines()) if r["event"] == "epoch"][-1]
    for figure in ("step", "loss", "validation_loss"):
        assert found[figure] == expected[figure]


def test_threads_go_on_with_their_own_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attempt that dies before it has taken its folder leaves nothing to go on with but the run of before."""
    file = write_job(tmp_path, JOB, MODEL)
    job = load_job(file, ["runtime.transport=local", f"checkpoint.dir={tmp_path / 'saved'}", "train.epochs=1"])
    plan = plan_of(job)

    def started(start: Start) -> list[str]:
        worker.run(job, plan, start)
        return capsys.readouterr().out.splitlines()

    started("new")
    listener = listen(LOOPBACK)
    names = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(listener.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    store = serve(listener, 20.0)
    with pytest.raises(UsageError, match="an earlier run was saved there"):
        started("new")
    assert any("is now in" in line for line in started("fresh"))
    assert any("resumed after" in line for line in started("fresh"))  # what that attempt had begun
    del store
