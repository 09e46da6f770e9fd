"""Runs of real processes that are killed, at any call of a save and at any moment, go on to the same weights.

whole     4 saves, no kill                                        ─▶ SHA-256 of the weights of each rank
killed    one rank kills itself; the others lose it, and end      ─▶ resumed                     ─▶ the same
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path

import pytest

from quintsched.runtime.comm.choose_transport import connect_for
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.settings.job_file import JobConfig
from quintsched.runtime.settings.run_settings import Start
from quintsched.runtime.train.trainer import Trainer

from ...helpers.jobs import data_file, job
from ..ranks import run_ranks
from .crash import crashing

__all__ = ["data_file"]

RANKS, PARTS = 2, 4
pytestmark = pytest.mark.processes


def train(config: str, start: Start, out: str, victim: int, at: int | None, after_s: float | None) -> None:
    """Train as one rank; the victim kills itself at a call that changes files, or after a while."""
    settings, rank = JobConfig.model_validate_json(config), int(os.environ["RANK"])
    plan = plan_of(settings)
    os.chdir(out)  # where the report of who died goes

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        trainer = Trainer.of_job(settings, plan, connect_for(plan, 60, "gloo", None))
        if rank == victim and after_s is not None:
            threading.Timer(after_s, die).start()
        with crashing(at if rank == victim else None, halves=bool((at or 0) % 2), end=die) as crash:
            trainer.fit(start)
        weights = trainer.engine.full_weights()
    except BaseException:
        os._exit(4)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().numpy().tobytes())
    Path(out, f"{rank}.json").write_text(json.dumps({"weights": digest.hexdigest(), "calls": crash.count}))
    os._exit(0)


def run(config: JobConfig, start: Start, out: Path, victim: int = -1, **how: int | float | None) -> list[int | None]:
    out.mkdir(exist_ok=True)
    given = (config.model_dump_json(exclude_unset=True), start, str(out), victim, how.get("at"), how.get("after_s"))
    return run_ranks(train, RANKS, *given, timeout_s=120)


def results(out: Path) -> list[dict[str, object]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


def config_of(data_file: Path, folder: Path) -> JobConfig:
    return job(
        data_file,
        parallel={"mesh": "pp=2"},
        checkpoint={"dir": str(folder), "every": 4},
        train={"epochs": 2},
        runtime={"timeout_s": 5.0},
    )


def require_the_same_after(data_file: Path, tmp_path: Path, victim: int, **how: int | float) -> bool:
    """Kill a run, resume it, and require the weights of the whole one; returns whether it was killed."""
    folder, whole = tmp_path / "saved", weights_of(tmp_path / "whole")
    shutil.rmtree(folder, ignore_errors=True)
    config = config_of(data_file, folder)
    codes = run(config, "new", tmp_path / "killed", victim, **how)
    assert codes[victim] in (0, -signal.SIGKILL)
    assert run(config, "resume", tmp_path / "resumed") == [0] * RANKS, (victim, how)
    assert weights_of(tmp_path / "resumed") == whole, (victim, how)
    assert not list(folder.glob(".*"))
    return codes[victim] != 0


def weights_of(out: Path) -> list[object]:
    return [rank["weights"] for rank in results(out)]


@pytest.fixture
def calls(data_file: Path, tmp_path: Path) -> list[int]:
    """Run without a kill; return how many calls each rank makes that change files."""
    assert run(config_of(data_file, tmp_path / "unkilled"), "new", tmp_path / "whole") == [0] * RANKS
    return [int(str(rank["calls"])) for rank in results(tmp_path / "whole")]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.slow
def test_a_rank_that_is_killed_at_any_call_of_a_save(
    data_file: Path, tmp_path: Path, calls: list[int], rank: int, part: int
) -> None:
    assert calls[rank] > 30
    for at in range(1 + part, calls[rank] + 1, PARTS):
        is_killed = require_the_same_after(data_file, tmp_path, rank, at=at)
        assert is_killed or at > calls[rank] - 4  # saves in the background make a call more or less


def test_a_rank_that_is_killed_in_the_middle_of_a_save(data_file: Path, tmp_path: Path, calls: list[int]) -> None:
    assert require_the_same_after(data_file, tmp_path, 0, at=calls[0] // 2)


@pytest.mark.slow
def test_runs_that_are_killed_at_random_moments(data_file: Path, tmp_path: Path, calls: list[int]) -> None:
    draw = random.Random(0)
    killed = sum(
        require_the_same_after(data_file, tmp_path, draw.randrange(RANKS), after_s=draw.uniform(0, 0.4))
        for _ in range(100)
    )
    assert killed > 50
