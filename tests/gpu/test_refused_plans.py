"""A plan that `check` refuses for a profile hangs on a GPU whose communicators are made that way, and where it says.

Messages are of 64 MiB: NCCL buffers small ones, and a send that waits for nobody closes no circle. That plans which are
free go on for 500 steps is seen in `test_matrix`.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.diagnostics import Point

from .machine import Machine
from .runs import CROSSED_SENDS, EARLY_RECEIVE, LATE_SEND, SHORT, moved

pytestmark = [pytest.mark.processes, pytest.mark.ranks(2)]

MESSAGE_BYTES = {"nccl": 64 * 2**20, "gloo": 4}
LIMIT_S = 10.0
PROFILES = ("blocking", "single-stream", "pair-stream")
SOUND = SHORT.plan


def stand(machine: Machine, folder: Path, plan: qs.Plan, profile: str) -> Sequence[int]:
    """Return at which instruction each rank stands in the end; -1 where it went through."""
    plan.save(folder / "plan.json")
    how = (profile, str(MESSAGE_BYTES[machine.backend]), str(LIMIT_S))
    worker = ("tests.gpu.replay_worker", machine.backend, folder, folder / "plan.json", *how)
    # A process that ends under a kernel that hangs ends all clients of a multi-process service: here is none.
    machine.run(2, *worker, timeout_s=120, variables={"CUDA_MPS_PIPE_DIRECTORY": str(folder)})
    return [int((folder / f"{rank}.txt").read_text()) for rank in range(2)]


REFUSED = [
    *(pytest.param(moved(SOUND, *EARLY_RECEIVE), profile, id=f"early receive, {profile}") for profile in PROFILES),
    *(pytest.param(moved(SOUND, *CROSSED_SENDS), profile, id=f"crossed sends, {profile}") for profile in PROFILES),
    pytest.param(moved(SOUND, *LATE_SEND), "channel", id="late send, channel"),
]


@pytest.mark.parametrize(("plan", "profile"), REFUSED)
def test_a_refused_plan_hangs(tmp_path: Path, machine: Machine, plan: qs.Plan, profile: str) -> None:
    verdict = plan.check(profile=profile)
    assert {finding.point for finding in verdict.findings} == {Point.DEADLOCK}
    machine.require_cuda("gloo matches messages by tag, and has no streams that could hang")
    cycle = {finding.rank: finding.index for finding in verdict.findings if finding.rank is not None}
    standing = stand(machine, tmp_path, plan, profile)
    assert dict(enumerate(standing)) == cycle, verdict.explain()


@pytest.mark.parametrize("moves", [EARLY_RECEIVE, CROSSED_SENDS], ids=["early receive", "crossed sends"])
def test_it_goes_through_where_it_is_free(tmp_path: Path, machine: Machine, moves) -> None:
    plan = moved(SOUND, *moves)
    assert plan.check(profile="channel").sound
    machine.require_cuda("gloo's waits block the host")
    assert list(stand(machine, tmp_path, plan, "channel")) == [-1, -1]


@pytest.mark.parametrize("profile", [*PROFILES, "channel"])
def test_what_we_compile_goes_through_everywhere(tmp_path: Path, machine: Machine, profile: str) -> None:
    assert list(stand(machine, tmp_path, SOUND, profile)) == [-1, -1]
