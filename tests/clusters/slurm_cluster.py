"""A SLURM cluster of two nodes on this machine: munged, slurmctld and two slurmd, from Debian's slurm-wlm and munge.

apt-get install slurm-wlm munge; processes are tracked by the process tree, without cgroups. Needs root.
By itself, `python -m tests.clusters.slurm_cluster` runs one until Ctrl-C, and prints how commands find it.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

CONFIGURATION = """
ClusterName=two
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP
"""


def require_slurm() -> None:
    """Skip where SLURM cannot be started."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "scancel") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and apt-get install slurm-wlm munge; not found: {', '.join(missing) or 'root'}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster within a context; yield the environment in which its commands find it."""
    (folder / "state").mkdir()
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    configuration.write_text(CONFIGURATION.format(folder=folder, ports=_free_ports(3)))
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    own = {"SLURM_CONF": str(configuration)}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", node] for node in ("n0", "n1")),
    ]
    with ExitStack() as stack:
        for number, daemon in enumerate(daemons):
            out = stack.enter_context((folder / f"daemon-{number}.txt").open("wb"))
            process = subprocess.Popen(daemon, env=os.environ | own, stdout=out, stderr=out, cwd=folder)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(1)
        deadline = time.monotonic() + 60
        while ask(own, "sinfo", "--noheader", "-o", "%t %D").split() != ["idle", "2"]:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.5)
        try:
            yield own
        finally:
            ask(own, "scancel", "--signal=KILL", "--full", "--user=root")
            ask(own, "scancel", "--user=root")
            time.sleep(1)


def ask(cluster: dict[str, str], *command: str) -> str:
    """Return what a command of SLURM prints."""
    done = subprocess.run(command, env=os.environ | cluster, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    with TemporaryDirectory(prefix="slurm-") as home, slurm(Path(home)) as told:
        exports = "\n".join(f"  export {name}={value}" for name, value in told.items())
        print(f"In another terminal:\n{exports}", flush=True)  # noqa: T201
        with suppress(KeyboardInterrupt):
            time.sleep(1e9)
