"""The commands of examples/killed_run.yaml: a rank is killed, named, drawn, and the run goes on on another mesh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from quintsched.runtime.data import DataSpec
from quintsched.runtime.user_objects.code_digest import describe_module
from quintsched.user_code import load_object

ROOT = Path(__file__).parents[1]
JOB = ROOT / "examples" / "killed_run.yaml"


def quintsched(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["quintsched", *map(str, arguments)]
    around = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, env=around, check=False)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_killed_run_is_explained_drawn_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    killed = quintsched(tmp_path, "run", JOB, KILLED="2:150")
    assert killed.returncode == 4, killed.stderr
    assert "\nerror: rank 2 (host " in killed.stderr
    assert "was killed by SIGKILL in step 19 at instruction 28 of 51: Fwd(stage=2, microbatch=5)" in killed.stderr
    drawn = quintsched(tmp_path, "render", "--stall", "out/killed/stall.json", "-o", "stall.png")
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "stall.png").stat().st_size > 10_000
    shown = quintsched(tmp_path, "checkpoint", "show", "out/killed", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)
    others = ("--set", "parallel.mesh=dp=2", "--set", "parallel.schedule=gpipe")
    resumed = quintsched(tmp_path, "run", JOB, "--resume", *others)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step 10" in resumed.stdout


def test_all_ranks_build_the_same_blocks_also_the_one_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run refuses blocks of other code on one rank before anything could be killed."""
    monkeypatch.setenv("KILLED", "2:150")
    told, data = [], DataSpec(input_shape=(1, 8, 8), num_classes=10)
    for rank in "02":
        monkeypatch.setenv("RANK", rank)
        blocks = load_object(f"{ROOT / 'examples' / 'killed_run.py'}:build")(data)
        told.append([describe_module(block()) for block in blocks])
    assert told[0] == told[1]
