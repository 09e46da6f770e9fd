"""A plan that `check` refuses for a profile hangs on a GPU whose communicators are made that way, and where it says.

Messages are of 64 MiB: NCCL buffers small ones, and a send that waits for nobody closes no circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.diagnostics import Point

from .sharing import torchrun, wants_ranks

pytestmark = [pytest.mark.processes, wants_ranks(2)]

MESSAGE_BYTES = 64 * 2**20
LIMIT_S = 10.0


def moved(plan: qs.Plan, *moves: tuple[int, int, int]) -> qs.Plan:
    """Return the plan after moves of one instruction each: on a rank, from an index to another."""
    programs = [list(program) for program in plan.programs]
    for rank, source, target in moves:
        programs[rank].insert(target, programs[rank].pop(source))
    return replace(plan, programs=tuple(map(tuple, programs)))


SOUND = qs.compile("1f1b", mesh="pp=2", microbatches=4)
EARLY_RECEIVE = moved(SOUND, (0, 3, 4))
"""Rank 0 waits for its first gradient before it sends its second activation: the README's."""
CROSSED_SENDS = moved(SOUND, (1, 2, 4))
"""Rank 1 sends its first gradient before it receives the second activation, which rank 0 sends at that time."""
LATE_SEND = moved(SOUND, (0, 4, 1), (0, 5, 2), (0, 3, 5), (1, 2, 0))
"""Rank 0 sends its first activation after its second, and before that waits for a gradient of the first."""


def stand(
    monkeypatch: pytest.MonkeyPatch, folder: Path, plan: qs.Plan, profile: str, backend: str = "nccl"
) -> Sequence[int]:
    """Return at which instruction each rank stands in the end; -1 where it went through."""
    plan.save(folder / "plan.json")
    size = MESSAGE_BYTES if backend == "nccl" else 4
    worker = ("tests.gpu.replay_worker", backend, folder, folder / "plan.json", profile, str(size), str(LIMIT_S))
    torchrun(monkeypatch, 2, *worker, timeout_s=120)
    return [int((folder / f"{rank}.txt").read_text()) for rank in range(2)]


REFUSED = [
    *((EARLY_RECEIVE, profile) for profile in ("blocking", "single-stream", "pair-stream")),
    *((CROSSED_SENDS, profile) for profile in ("blocking", "single-stream", "pair-stream")),
    (LATE_SEND, "channel"),
]


@pytest.mark.parametrize(("plan", "profile"), REFUSED)
def test_a_refused_plan_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: qs.Plan, profile: str) -> None:
    verdict = plan.check(profile=profile)
    assert {finding.point for finding in verdict.findings} == {Point.DEADLOCK}
    cycle = {finding.rank: finding.index for finding in verdict.findings if finding.rank is not None}
    standing = stand(monkeypatch, tmp_path, plan, profile)
    assert dict(enumerate(standing)) == cycle, verdict.explain()


@pytest.mark.parametrize("plan", [EARLY_RECEIVE, CROSSED_SENDS])
def test_it_goes_through_where_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: qs.Plan) -> None:
    assert plan.check(profile="channel").sound
    assert list(stand(monkeypatch, tmp_path, plan, "channel")) == [-1, -1]


@pytest.mark.parametrize("profile", ["blocking", "single-stream", "pair-stream", "channel"])
def test_what_we_compile_goes_through_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str) -> None:
    assert list(stand(monkeypatch, tmp_path, SOUND, profile)) == [-1, -1]
