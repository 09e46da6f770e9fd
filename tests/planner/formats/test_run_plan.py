"""The plan of a run beside its traces and checkpoints, and what differs from another plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.formats import run_plan
from quintsched.formats.run_plan import differences, plan_beside, save_beside


def plan(schedule: str = "1f1b", mesh: str = "pp=2", microbatches: int = 4, **more: object) -> qs.Plan:
    return qs.compile(schedule, mesh=mesh, microbatches=microbatches, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"mesh": "dp=2,pp=2"}, "mesh is dp=2,pp=2 there, but pp=2 here"),
        ({"microbatches": 8}, "schedule.microbatches is 8 there, but 4 here"),
        ({"schedule": "zb-h1"}, "schedule.name is zb-h1 there, but 1f1b here"),
        ({"recompute": 1}, "recompute is [1, 1] there, but not given here"),
        ({"stages": [1, 2]}, "blocks_per_stage is [1, 2] there, but not given here"),
    ],
    ids=repr,
)
def test_the_setting_that_differs_is_named(other: dict[str, object], words: str) -> None:
    assert differences(plan(**other), plan()) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, 2**21])
def test_a_plan_is_found_beside_what_a_run_leaves(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "MOST_IN_JSON", most)
    assert plan_beside(tmp_path) is None
    path = save_beside(plan(), tmp_path)
    assert path.name == ("plan.json" if most else "plan.qplan")
    found = plan_beside(tmp_path)
    assert found is not None
    assert found[0] == path
    assert qs.Plan.of(found[1]) == plan()
    path.write_text("{")
    assert plan_beside(tmp_path) is None
