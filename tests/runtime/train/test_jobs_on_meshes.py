"""Jobs train to the losses of one rank however a mesh shares out their data, layers and experts, and after a resume."""

from pathlib import Path
from typing import Any

import pytest

from ...helpers.jobs import COUNTING, DATA, joined, losses_of, run_job


def gpt(name: str = "gpt", **options: Any) -> dict[str, Any]:
    return {"model": {"name": name, "options": {"hidden": 32, "depth": 2} | options}}


def on(mesh: str, **more: Any) -> dict[str, Any]:
    return {"parallel": {"mesh": mesh} | more}


COUNTS = {
    "data": {"name": "counting.py:load"},
    "parallel": {"microbatches": 2},
    "train": {"epochs": 1, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.01}, "clip": 1.0},
}
TIED, MOE = gpt(tied=True), gpt("moe-gpt", experts=4, mlp_ratio=1)
IMAGES = {
    "data": {"name": "steps.py:load"},
    "model": {"options": {"depth": 2, "hidden": 16, "heads": 2, "dropout": 0.2}},
    "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2, "zero": 1},
    "train": {"batch_size": 16, "clip": 1.0},
}
UNEVEN = on("pp=2", schedule="zbv", microbatches=4, stage_to_pp=[0, 0, 1, 1, 1, 0], stages=[1, 1, 0, 1, 3, 0])
PADDED = gpt("moe-gpt", experts=4, mlp_ratio=1, capacity_factor=2.0, pad_to_capacity=True)

JOBS: dict[str, tuple[Any, list[Any]]] = {
    "tokens": (
        joined(COUNTS, TIED),
        [
            on("cp=2,pp=2", context="ring"),
            on("tp=2", rules={"*.attention.*": "replicate", "3.head": "row"}),
            on("pp=2", schedule="seq-1f1b", slices=4, balance="measured"),
        ],
    ),
    "uneven stages": (joined(COUNTS, gpt(depth=4, tied=True), on("pp=1", microbatches=4)), [UNEVEN]),
    "experts": (joined(COUNTS, MOE, on("pp=1", microbatches=4)), [joined(on("ep=2,pp=2", microbatches=2), PADDED)]),
    "a z-loss": (joined(COUNTS, gpt(), {"train": {"z_loss": 0.1}}), [on("tp=2"), on("pp=2")]),
    "batches in parts": (IMAGES, [{"train": {"accumulate": 4}}]),
}
"""A job of one rank, or of a mesh, and what else runs of it may say and change no number."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("counting.py").write_text(COUNTING)
    Path("steps.py").write_text(DATA)


@pytest.mark.parametrize("name", JOBS)
def test_what_changes_no_number_changes_no_loss_and_no_count_of_experts_tokens(name: str) -> None:
    job, others = JOBS[name]
    alone = run_job(job)
    assert len(alone) >= 2
    for other in others:
        found = run_job(job, other)
        assert losses_of(found) == pytest.approx(losses_of(alone), abs=1e-10, rel=1e-9)
        assert [one.get("expert_tokens") for one in found] == [one.get("expert_tokens") for one in alone]
        uneven = [one for one in found if "expert_imbalance" in one]
        assert len(uneven) == (4 if name == "experts" else 0)
        for one in uneven:
            rows = one["expert_tokens"].values()
            assert [sum(row) for row in rows] == [16 * 8 * 2] * 2
            assert one["expert_imbalance"] == max(map(max, rows)) * 4 / (16 * 8 * 2)
