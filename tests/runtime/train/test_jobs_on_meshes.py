"""Jobs train to the losses of one rank however a mesh shares them out; built-in losses by their formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from quintsched.errors import UsageError
from quintsched.runtime.data import IGNORED_TARGET
from quintsched.runtime.train.built_in_losses import CausalZLoss, ZLoss, correct_sum, cross_entropy_sum, with_z_loss

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


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_bf16_still_counts_beyond_256(dtype: torch.dtype, summed: torch.dtype) -> None:
    logits, targets = torch.zeros(301, 2, dtype=dtype), torch.zeros(301, dtype=torch.int64)
    loss, weight = cross_entropy_sum(logits, targets)
    assert weight == correct_sum(logits, targets) == 301
    assert {loss.dtype, weight.dtype, correct_sum(logits, targets).dtype} == {summed}


def test_a_z_loss_by_its_formula() -> None:
    logits, targets = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[0, 1, IGNORED_TARGET], [3, 2, 1]])
    total, weight = ZLoss(0.1)(logits, targets)
    counts = targets != IGNORED_TARGET
    expected = cross_entropy_sum(logits, targets)[0] + 0.1 * logits.logsumexp(-1)[counts].square().sum()
    torch.testing.assert_close(total, expected)
    assert weight == 5
    causal, _ = CausalZLoss(0.1)(logits, targets)
    torch.testing.assert_close(causal, ZLoss(0.1)(logits[:, :-1], targets[:, 1:])[0])
    with pytest.raises(UsageError, match="z_loss is for cross-entropies"):
        with_z_loss(F.mse_loss, 0.1)
