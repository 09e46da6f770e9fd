"""A job file on SLURM from Python: a task for each rank, started, watched and queued again by submitit.

    pip install '.[examples]' submitit
    python examples/clusters/slurm_submitit.py examples/clusters/job.yaml --nodes 2 --ranks-per-node 2 [--set A.B=C …]

SLURM sends SIGUSR2 before the time is over, or when it wants the nodes back. The run finishes its step and saves;
submitit then queues the job again, which goes on from there.
"""

import argparse
import os
import re
import signal
import subprocess
from pathlib import Path

import submitit

from quintsched.runtime.launch.worker import main as run_rank


def address_of(node: str) -> str:
    """Return the address by which SLURM reaches a node; it need not be the node's name."""
    shown = subprocess.run(["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True, check=True)
    (address,) = re.findall(r" NodeAddr=(\S+)", shown.stdout)
    return str(address)


class Run:
    """One rank of a job; submitit pickles it, and calls it in each task."""

    def __init__(self, job: str, settings: list[str]) -> None:
        self.job, self.settings = job, settings

    def __call__(self) -> int:
        place = submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        os.environ["MASTER_ADDR"] = address_of(place.master_addr)
        queue_again = signal.getsignal(signal.SIGUSR2)
        was_asked = []

        def ask(*_: object) -> None:
            was_asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)  # which asks the run to stop after the step

        signal.signal(signal.SIGUSR2, ask)
        settings = [word for setting in self.settings for word in ("--set", setting)]
        code = run_rank(["--config", self.job, "--resume", *settings])
        signal.signal(signal.SIGUSR2, queue_again)
        if was_asked and code == 0 and place.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)  # submitit's own handler, which queues the job again
            signal.pause()
        if code:
            raise RuntimeError(f"the run ended with exit code {code}; the verdict is above")
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--minutes", type=int, default=720)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    executor = submitit.AutoExecutor(folder="out/submitit-%j", cluster="slurm", slurm_max_num_timeout=100)
    executor.update_parameters(
        nodes=given.nodes,
        tasks_per_node=given.ranks_per_node,
        timeout_min=given.minutes,
        slurm_signal_delay_s=120,
        name="quintsched",
    )
    job = executor.submit(Run(str(Path(given.job).resolve()), given.set))
    print(job.job_id, flush=True)
    job.wait()
    print(job.stdout())
