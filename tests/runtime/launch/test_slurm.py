"""The SLURM script, with a cluster of two nodes that is a few lines of shell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "slurm.sh"

COMMANDS = {
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; if [[ $1 == show ]]; then echo "node7"; echo "node8"; fi',
    "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit $?; done',
    "quintsched": 'echo "quintsched $*" >> "$CALLS"; echo "$SAYS"; exit "$CODE"',
}


def submit(folder: Path, says: str, code: int) -> tuple[int, list[str]]:
    """Run the script as SLURM would; return its exit code, and what it called."""
    (folder / "bin").mkdir()
    for name, body in COMMANDS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    cluster = {"SLURM_JOB_ID": "41", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    said = {"CALLS": str(folder / "calls"), "SAYS": says, "CODE": str(code)}
    environment = os.environ | cluster | said | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", SCRIPT, "job.yaml", "--set", "train.epochs=3"], cwd=folder, env=environment, timeout=30, check=False
    )
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("says", "code", "again"), [("stopped as asked: saved at step 7", 0, True), ("", 0, False), ("", 4, False)]
)
def test_a_launcher_on_each_node_and_again_only_where_more_is_to_be_done(
    tmp_path: Path, says: str, code: int, again: bool
) -> None:
    (tmp_path / "out" / "checkpoints-41").mkdir(parents=True)
    found, calls = submit(tmp_path, says, code)
    assert found == code
    runs = [call for call in calls if call.startswith("quintsched")]
    for number, call in enumerate(runs):
        assert call == (
            "quintsched run job.yaml --set checkpoint.dir=out/checkpoints-41 --set checkpoint.every=500 --restarts 3 "
            f"--resume --set train.epochs=3 --nnodes 2 --node-rank {number} --master node7:20041"
        )
    assert len(runs) == (1 if code else 2)
    assert ("scontrol requeue 41" in calls) == again
