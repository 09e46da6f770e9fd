"""Jobs train to the losses of one rank however a mesh shares out their data, layers and experts, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quintsched as qs

from ...helpers.jobs import COUNTING, joined, launch, losses_of, run_job

PAIRS = """
from functools import partial
from torch.utils.data import DataLoader
from quintsched.runtime.data import DataSpec, Loaders, PromptAnswers, concatenated, pad_batch

PAIRS = [(f"{a} + {b} =", f" {a + b}") for a in range(6) for b in range(4, 8)]


def load(replica, num_replicas):
    share = 8 // num_replicas
    batches = [range(first + replica * share, first + (replica + 1) * share) for first in range(0, 24, 8)]
    samples = PromptAnswers(PAIRS, concatenated(end=0))
    collate = partial(pad_batch, multiple=4, shift=True)
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate)
    return Loaders(loader, spec=DataSpec(input_shape=(16,), num_classes=256))
"""
"""Data file of prompts and answers."""


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
DECAYED = {"train": {"optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "decay": "matrices"}}}
TEXT = {
    **gpt(kv_heads=2, positions="rope", tied=True),
    "data": {"name": "text", "path": "text", "options": {"sequence": 16}},
    "parallel": {"microbatches": 2},
    "train": {
        "batch_size": 8,
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 2.0, "decay": "matrices"},
        "lr_schedule": {"name": "cosine", "warmup_steps": 4},
        "clip": 1.0,
    },
}
ANSWERS = {
    **gpt(hidden=16, heads=2, positions="rope"),
    "data": {"name": "pairs.py:load"},
    "parallel": {"microbatches": 2},
    "train": {"batch_size": 8, "epochs": 2},
}
DIGITS = {
    "model": {"options": {"depth": 2, "hidden": 16, "heads": 2}},
    "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2, "zero": 1},
    "train": {"batch_size": 512, "clip": 1.0},
}
UNEVEN = on("pp=2", schedule="zbv", microbatches=4, stage_to_pp=[0, 0, 1, 1, 1, 0], stages=[1, 1, 0, 1, 3, 0])
PADDED = gpt("moe-gpt", experts=4, mlp_ratio=1, capacity_factor=2.0, pad_to_capacity=True)
SLICED = on("pp=2", schedule="seq-1f1b", slices=4, balance="measured")

JOBS: dict[str, tuple[Any, list[Any]]] = {
    "tokens": (
        joined(COUNTS, TIED),
        [
            on("cp=2,pp=2", context="ring"),
            on("cp=4", context="ulysses"),
            on("pp=2,tp=2", sequence_parallel=True),
            on("tp=2", rules={"*.attention.*": "replicate", "3.head": "row"}),
            SLICED,
        ],
    ),
    "masks": (joined(COUNTS, gpt(hidden=16, dropout=0.1)), [on("dp=1,pp=2,tp=2")]),
    "sharded state": (joined(COUNTS, TIED, DECAYED), [on("dp=2,pp=2", zero=1), on("dp=2,pp=2", zero=3)]),
    "uneven stages": (joined(COUNTS, gpt(depth=4, tied=True), on("pp=1", microbatches=4)), [UNEVEN]),
    "experts": (
        joined(COUNTS, MOE, on("pp=1", microbatches=4)),
        [on("ep=2,pp=2", microbatches=2), joined(on("ep=2,pp=2", microbatches=2), PADDED)],
    ),
    "text": (TEXT, [on("pp=2"), on("tp=2"), on("dp=2")]),
    "prompts and answers": (ANSWERS, [on("dp=2,pp=2")]),
    "batches in parts": (DIGITS, [{"train": {"accumulate": 4}}]),
}
"""A job of one rank, or of a mesh, and what else runs of it may say and change no number."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("counting.py").write_text(COUNTING)
    Path("pairs.py").write_text(PAIRS)
    Path("text").write_bytes(Path(torch.__file__).read_bytes()[:3500])


@pytest.mark.parametrize("name", JOBS)
def test_what_changes_no_number_changes_no_loss_and_no_count_of_experts_tokens(name: str) -> None:
    job, others = JOBS[name]
    alone = run_job(job)
    assert len(alone) >= 2
    for other in others:
        found = run_job(job, other)
        assert losses_of(found) == pytest.approx(losses_of(alone), abs=1e-10, rel=1e-9)
        assert [one.get("expert_tokens") for one in found] == [one.get("expert_tokens") for one in alone]


def test_the_log_has_the_rows_of_all_experts_and_how_uneven_they_are() -> None:
    steps = [one for one in run_job(COUNTS, MOE, on("ep=2,pp=2")) if one["event"] == "step"]
    assert len(steps) == 4
    for one in steps:
        rows = one["expert_tokens"]
        assert list(rows) == ["1.mlp", "2.mlp"]
        assert all(sum(row) == 16 * 8 * 2 for row in rows.values()), rows
        assert one["expert_imbalance"] == max(max(row) for row in rows.values()) * 4 / (16 * 8 * 2)


def test_a_job_learns_and_decays_what_it_is_told() -> None:
    of_matrices, of_all = (losses_of(run_job(joined(TEXT, on("dp=1"), change))) for change in ({}, ALL_DECAYED))
    assert of_matrices[0] == pytest.approx(np.log(256), rel=0.02)
    assert of_matrices[-2] < of_matrices[0]
    assert of_all[-1] != pytest.approx(of_matrices[-1], abs=1e-4)


ALL_DECAYED = {"train": {"optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 2.0, "decay": "all"}}}
BF16 = {"runtime": {"precision": "bfloat16"}}
RESUMED: dict[str, list[Any]] = {
    "experts": [COUNTS, gpt("moe-gpt", experts=4, capacity_factor=1.0), on("dp=2,ep=2", microbatches=1)],
    "ZeRO-2": [COUNTS, TIED, DECAYED, on("dp=2,pp=2", zero=2), BF16],
    "ZeRO-3": [COUNTS, TIED, DECAYED, on("dp=2,pp=2", zero=3), BF16],
    "uneven stages": [COUNTS, gpt(depth=4, tied=True), UNEVEN],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RESUMED)
def test_a_job_that_is_resumed_goes_on_as_if_never_stopped(name: str) -> None:
    job, longer = RESUMED[name], {"train": {"epochs": 2}}
    figures = ("epoch", "loss", "grad_norm", "expert_tokens", "validation_loss")
    begun, through = run_job(joined(*job, saved("begun"))), run_job(joined(*job, saved("through"), longer))
    resumed = run_job(joined(*job, saved("begun"), longer), arguments=("--resume",))
    found = [[record.get(name) for name in figures] for record in begun + resumed]
    assert found == [[record.get(name) for name in figures] for record in through]


def saved(folder: str) -> dict[str, Any]:
    return {"checkpoint": {"dir": folder}}


@pytest.mark.parametrize(
    ("parallel", "plan", "words"),
    [
        ({"mesh": "dp=2", "zero": 3}, {"mesh": "dp=2", "zero": 2}, "zero is 3 in the job file but 2 in the plan"),
        ({"mesh": "pp=2", "stages": [3, 1]}, None, "stages have 3,1 blocks, 4 of a model, but the model has 10"),
    ],
)
def test_a_plan_or_model_that_is_another_ends_a_job(
    parallel: Any, plan: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if plan is not None:
        qs.compile("1f1b", microbatches=1, **plan).save("plan.json")
        parallel = {**parallel, "plan": "plan.json"}
    assert launch({"parallel": parallel}) == 3
    assert words in capsys.readouterr().err
