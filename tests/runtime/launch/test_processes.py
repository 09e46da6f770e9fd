"""Real processes: the first error is told, nothing is left, nobody listens beyond this machine or unpickles."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from ...helpers.commands import DATA, run
from ...helpers.jobs import write_job
from ..faults.launched import run_with

pytestmark = pytest.mark.processes

BOMB = """
import os
from torch import nn

FUSE = __file__ + ".lit"

class Bomb(nn.Linear):
    steps = 0
    def forward(self, x):
        self.steps += not x.is_meta
        if self.steps > 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            open(FUSE, "w").close()
            raise ValueError("the bomb went off")
        return super().forward(x)

class First(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1))

def build(data):
    if "RANK" in os.environ:
        for pid in (os.getpid(), os.getppid()):  # of the rank, and of the server that has forked it
            open(f"{__file__}.{pid}", "w").close()
    return [lambda: First(64, 8), lambda: Bomb(8, 8), lambda: Bomb(8, 8), lambda: nn.Linear(8, 4)]
"""


def test_the_first_error_is_what_the_user_sees_first_and_nothing_is_left_running(tmp_path):
    last, model = "rank 1 (dp=1)", tmp_path / "model.py"
    job = write_job(tmp_path, BOMB, {"parallel": {"mesh": "dp=2"}, "log": {"path": f"{tmp_path}/log.jsonl"}})
    code, _, err = run(sys.executable, "-m", "quintsched.runtime.launch.local_run", "--config", job)
    assert code == 1
    assert re.fullmatch(
        re.escape(f"error: {last}, stage ") + r"\d, block 1 \(Bomb\): ValueError: the bomb went off",
        err.splitlines()[0],
    )
    assert f"on {last}, instruction " in err.splitlines()[1]
    assert f'File "{model}", line ' in err
    assert "error: rank 0" not in err
    assert time.time() - Path(f"{model}.lit").stat().st_mtime < 10  # all ranks have ended since it went off
    started = [int(file.suffix[1:]) for file in tmp_path.glob("model.py.[0-9]*")]
    assert len(started) == int(last[5]) + 2  # the ranks and the server
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_processes_refuse_a_job_whose_ranks_are_threads_of_one(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", {"runtime": {"transport": "local"}})
    ended = run_with(None, tmp_path, json.loads(job.read_text()), 60, "--nproc", "2")
    assert (ended.code, ended.said.count("error: runtime.transport is local")) == (3, 1)


@pytest.mark.parametrize("section", ["model", pytest.param("data", marks=pytest.mark.slow)])
def test_what_one_rank_refuses_is_said_once(tmp_path: Path, section: str) -> None:
    """Data are loaded together, and no rank goes on without: of what all refuse it is not said that it is rank 0's."""
    built = "from torch import nn\ndef build(data):\n    return [lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4))]"
    odd, why = tmp_path / "odd.py", "import os\nassert os.environ['RANK'] != '1', 'not on this one'\n"
    odd.write_text(why + (DATA if section == "data" else built))
    named = {"name": f"{odd}:{'load' if section == 'data' else 'build'}"}
    log = {"path": f"{tmp_path}/log.jsonl"}
    job = write_job(tmp_path, built, {"parallel": {"mesh": "dp=2"}, section: named, "log": log})
    ended = run_with(None, tmp_path, json.loads(job.read_text()))
    assert (ended.code, ended.said.count("not on this one")) == (2, 1)
    whose = r"rank 1 \(host [^)]+\) failed: " if section == "model" else ""
    assert re.search(f"^error: {whose}{odd}:2: the import failed: AssertionError: not on this one", ended.said, re.M)


WATCHING = """
import os, signal
from pathlib import Path
from torch import nn

HERE = Path(__file__).parent

def sockets(pid):
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(file))
        except OSError:
            pass
    return found

def listening(pid):
    mine = sockets(pid)
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            is_open = words[3] == "0A" if kind.startswith("tcp") else words[2].endswith(":0000")
            if is_open and f"socket:[{words[9]}]" in mine:
                yield f"{kind} {words[1].rpartition(':')[0]}"

class Last(nn.Linear):
    steps = 0
    def forward(self, x):
        self.steps += not x.is_meta
        if self.steps == 3:
            launcher = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
            assert not [*listening(os.getppid())]  # the fork server
            for pid in {os.getpid(), int(launcher)}:
                (HERE / f"listening-{pid}").write_text("\\n".join(listening(pid)))
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x)

def build(data):
    return [nn.Flatten, lambda: Last(64, 4)]
"""

AUDIT = """
import os, sys
from pathlib import Path

def note(event, arguments):
    if event == "pickle.find_class":
        with Path(__file__).with_name("pickled").open("a") as file:
            print(os.getpid(), sys.argv, *arguments, file=file)

sys.addaudithook(note)
Path(__file__).with_name(f"audited-{os.getpid()}").touch()
"""

COMMAND = "from quintsched.cli import main; main()"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as the kernel writes them."""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc/net/tcp")
def test_one_machine_listens_on_loopback_only_and_nothing_is_unpickled(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    parallel, saving = {"mesh": "dp=2", "microbatches": 2, "zero": 1}, {"dir": f"{tmp_path}/saved"}
    job = write_job(tmp_path, WATCHING, {"parallel": parallel, "checkpoint": saving})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = run(sys.executable, "-c", COMMAND, "run", job)
    assert code == 0, err
    assert "stopped as asked: saved at step 2\n" in out
    found = {file.name: file.read_text().splitlines() for file in tmp_path.glob("listening-*")}
    assert len(found) == 3  # the launcher, and the last stage's ranks
    assert all(found.values())
    assert all(line.split()[1] in LOOPBACK for lines in found.values() for line in lines), found
    assert len([*tmp_path.glob("audited-*")]) == 3  # the command, the launcher, and what the ranks are forked from
    assert not (tmp_path / "pickled").exists(), (tmp_path / "pickled").read_text()
    assert (tmp_path / "saved" / "step-00000002").is_dir()
