"""Faults in real processes: the rank and the instruction are named, nobody else ever is, and nothing is left."""

from collections import Counter
from pathlib import Path

import pytest

from ..launch.hosts import why_no_hosts
from .injection import ENDS, Injection, all_injections, place_of
from .judged import judge_all
from .launched import plan_of_job

CRASH_S = 2.0
"""Time limit for the report of a crash, in seconds."""

CODES = {"raise": (1,), "skip_recv": (3, 4), "odd": (3,)}
"""The exit codes of runs: 4, but for errors of the culprit itself, such as that a message left over does not fit."""


def quick() -> list[Injection]:
    """Return a few faults of each kind, in each phase where it can be, on three ranks."""
    plan = plan_of_job("pp=3")
    return [
        Injection("kill", 0, "set-up"),
        Injection("raise", 1, "save"),
        Injection("odd", 2, "set-up"),
        Injection("exit5", 2, "optimizer", 2, place_of(plan, 2, "optimizer", "exit5")),
        Injection("exit0", 1, "reduction", 2, place_of(plan, 1, "reduction", "exit0")),
        Injection("kill", 1, "steady", 3, place_of(plan, 1, "steady", "kill")),
        Injection("raise", 0, "cool-down", 2, place_of(plan, 0, "cool-down", "raise")),
        Injection("stop", 2, "warm-up", 2, place_of(plan, 2, "warm-up", "stop")),
        Injection("sleep", 1, "steady", 2, place_of(plan, 1, "steady", "sleep")),
        Injection("skip_send", 0, "warm-up", 2, place_of(plan, 0, "warm-up", "skip_send")),
        Injection("skip_recv", 1, "warm-up", 2, place_of(plan, 1, "warm-up", "skip_recv")),
        Injection("skip_recv", 1, "cool-down", 2, place_of(plan, 1, "cool-down", "skip_recv", 1)),
        Injection("large", 2, "steady", 2, place_of(plan, 2, "steady", "large")),
        Injection("other", 1, "cool-down", 2, place_of(plan, 1, "cool-down", "other")),
    ]


@pytest.mark.processes
def test_a_fault_of_each_kind_is_told_and_named(tmp_path: Path) -> None:
    judged = judge_all(quick(), tmp_path, "pp=3", at_once=3)
    for one in judged:
        assert one.placed, f"{one.injection}\n{one.said}"
        assert not one.left
        assert one.code in CODES.get(one.injection.kind, (4,)), one.said
        assert one.told_s is not None


JOBS = (("pp=3", "1f1b"), ("dp=2,pp=2", "1f1b"), ("pp=4", "zb-h1"), ("pp=2,tp=2", "1f1b"), ("dp=2,pp=3", "gpipe"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("mesh", "schedule"), JOBS)
def test_sixty_faults_of_a_mesh(tmp_path: Path, mesh: str, schedule: str) -> None:
    seed = JOBS.index((mesh, schedule))
    injections = all_injections(plan_of_job(mesh, schedule), 60, seed=seed, links=why_no_hosts() is None)
    judged = judge_all(injections, tmp_path, mesh, schedule=schedule, at_once=2)
    assert not [one for one in judged if one.wrong or one.left]
    assert not [one for one in judged if one.silent], "a fault went by unseen"
    assert sum(one.placed for one in judged) >= 0.99 * len(judged)
    crashes = [one.told_s for one in judged if one.injection.kind in ENDS]
    late = Counter(told is None or told > CRASH_S for told in crashes)
    assert late[True] <= 1, crashes
