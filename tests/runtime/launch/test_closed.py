"""A run of one machine listens nowhere but on the loopback interface, and unpickles nothing, also as it is stopped."""

import sys
from pathlib import Path

import pytest

from ...helpers.commands import DATA, run

pytestmark = pytest.mark.processes

JOB = """
model: {{name: "{folder}/model.py:build"}}
data: {{name: "{folder}/data.py:load"}}
parallel: {{mesh: "dp=2", microbatches: 2, zero: 1}}
train: {{epochs: 1, batch_size: 16}}
runtime: {{timeout_s: 60}}
checkpoint: {{dir: "{folder}/saved"}}
"""

MODEL = """
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
def test_one_machine_listens_on_loopback_only_and_nothing_is_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"data": DATA, "model": MODEL, "sitecustomize": AUDIT}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "job.yaml").write_text(JOB.format(folder=tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    code, out, err = run(sys.executable, "-c", COMMAND, "run", tmp_path / "job.yaml")
    assert code == 0, err
    assert "stopped as asked: saved at step 2\n" in out
    found = {file.name: file.read_text().splitlines() for file in tmp_path.glob("listening-*")}
    assert len(found) == 3  # the launcher, and the last stage's ranks
    assert all(found.values())
    assert all(line.split()[1] in LOOPBACK for lines in found.values() for line in lines), found
    assert len([*tmp_path.glob("audited-*")]) == 3  # the command, the launcher, and what the ranks are forked from
    assert not (tmp_path / "pickled").exists(), (tmp_path / "pickled").read_text()
    assert (tmp_path / "saved" / "step-00000002").is_dir()
