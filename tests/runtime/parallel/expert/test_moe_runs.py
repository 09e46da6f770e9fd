"""Experts shared out over ranks train as the same model does in one process, on every mesh and schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.launch.worker import main
from tests.compiling import torch_compiles

from ....helpers.jobs import COUNTING
from .moe_training import require_equality

MESHES = [
    "pp=1",
    "ep=2",
    "ep=4",
    "dp=2,ep=2",
    "ep=2,dp=2",
    "pp=2,ep=2",
    "ep=2,tp=2",
    "tp=2,pp=2",
    "cp=2,ep=2",
    "cp=2,dp=2",
    "dp=2,pp=2,ep=2",
    "ep=2,pp=2,tp=2",
    "dp=2,ep=2,tp=2",
    "cp=2,ep=2,pp=2",
    "cp=2,dp=2,ep=2",
    "tp=2,cp=2,ep=2",
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_equal_one_process(mesh: str) -> None:
    sizes = qs.Mesh.parse(mesh)
    microbatches = 2 if sizes.axis_size("dp") * sizes.axis_size("ep") <= 4 else 1
    require_equality(qs.compile("1f1b", mesh=mesh, microbatches=microbatches))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "chunks", "recompute"),
    [
        ("zb-h1", "pp=2,ep=2", None, 0),
        ("zb-h1", "dp=2,pp=2,ep=2", None, 1),
        ("interleaved-1f1b", "ep=2,pp=2", 2, 1),
        ("interleaved-1f1b", "pp=2,ep=2,tp=2", 2, 0),
        ("zbv", "pp=2,ep=2", None, 0),
        ("dualpipe", "ep=2,pp=2", None, 0),
        ("1f1b", "ep=2,cp=2", None, 1),
        ("1f1b", "ep=2", None, 2),
        ("gpipe", "ep=2,pp=2", None, 1),
    ],
)
def test_other_schedules_equal_one_process(schedule: str, mesh: str, chunks: int | None, recompute: int) -> None:
    microbatches = 2 if "dp" in mesh else 4
    plan = qs.compile(schedule, mesh=mesh, microbatches=microbatches, chunks=chunks, recompute=recompute)
    require_equality(plan)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu", "norm": "rmsnorm", "shared_experts": 2, "renormalise": True, "positions": "rope"},
        {"top_k": 1, "every": 2, "experts": 8, "balance": 0.0},
        {"tied": True, "balance": 0.0, "z": 0.0, "top_k": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", ["dp=2,ep=2,pp=2", "ep=2,tp=2,pp=2"])
def test_variants_equal_one_process(mesh: str, options: dict[str, Any]) -> None:
    tied = {"embedding": (0, 1)} if "tied" in options else {}
    require_equality(qs.compile("1f1b", mesh=mesh, microbatches=2, tied=tied, buckets_per_stage=2), **options)


LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "shared_experts": 2, "positions": "rope", "kv_heads": 2}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "more", "options"),
    [
        ("1f1b", "tp=2", {}, {}),
        ("1f1b", "ep=2,tp=2,pp=2", {"recompute": 1}, LLAMA),
        ("zb-h1", "tp=2,cp=2,ep=2", {}, {"shared_experts": 1}),
        ("zb-h1", "pp=2,tp=2", {}, LLAMA),
        ("interleaved-1f1b", "ep=2,pp=2,tp=2", {"chunks": 2}, {}),
    ],
)
@pytest.mark.parametrize("rules", [{}, {"*.experts.*": "replicate"}], ids=str)
def test_tokens_that_are_shared_out_over_tp_equal_one_process(
    schedule: str, mesh: str, more: dict[str, int], options: dict[str, Any], rules: dict[str, str]
) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **more)  # type: ignore[arg-type]
    require_equality(plan, {"sequence_parallel": True, "rules": rules}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_all_five_axes_equal_one_process(sequence_parallel: bool) -> None:
    plan = qs.compile("zb-h1", mesh="dp=2,ep=2,pp=2,cp=2,tp=2", microbatches=2)
    require_equality(plan, {"sequence_parallel": sequence_parallel})


@pytest.mark.slow
@torch_compiles
def test_compiled_stages_equal_one_process() -> None:
    plan = qs.compile("zb-h1", mesh="ep=2,dp=2", microbatches=2)
    require_equality(plan, {"compiled": True}, shared_experts=1)


JOB = """
model: {name: moe-gpt, options: {hidden: 32, depth: 2, experts: 4, mlp_ratio: 1, capacity_factor: CAPACITY}}
data: {name: "DATA:load"}
parallel: {mesh: "MESH", microbatches: MICROBATCHES}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}, clip: 1.0}
runtime: {transport: local, precision: float64}
checkpoint: {dir: FOLDER}
log: {path: FOLDER/log.jsonl, every: 1}
"""


def train_job(
    folder: Path, mesh: str, microbatches: int, *arguments: str, capacity: str = "null"
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "data.py").write_text(COUNTING)
    words = {"DATA": str(folder / "data.py"), "MESH": mesh, "FOLDER": str(folder), "CAPACITY": capacity}
    text = JOB.replace("MICROBATCHES", str(microbatches))
    for word, value in words.items():
        text = text.replace(word, value)
    (folder / "job.yaml").write_text(text)
    assert main(["--config", str(folder / "job.yaml"), *arguments]) == 0
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] != "end"]


def test_a_job_trains_on_experts_to_the_same_losses_and_says_how_they_are_loaded(tmp_path: Path) -> None:
    alone = train_job(tmp_path / "alone", "pp=1", 4)
    ranks = train_job(tmp_path / "ranks", "ep=2,pp=2", 2)
    assert len(alone) == len(ranks) == 6
    for one, other in zip(alone, ranks, strict=True):
        assert other.get("loss") == pytest.approx(one.get("loss"), abs=1e-10)
        assert other.get("expert_tokens") == one.get("expert_tokens")
        if one["event"] == "step":
            rows = one["expert_tokens"]
            assert list(rows) == ["1.mlp", "2.mlp"]
            assert all(sum(row) == 16 * 8 * 2 for row in rows.values()), rows
            assert one["expert_imbalance"] == max(max(row) for row in rows.values()) * 4 / (16 * 8 * 2)


def test_a_run_with_experts_that_is_resumed_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    longer = ("--set", "train.epochs=2")
    straight = train_job(tmp_path / "straight", "dp=2,ep=2", 1, *longer, capacity="1.0")
    train_job(tmp_path / "twice", "dp=2,ep=2", 1, capacity="1.0")
    both = train_job(tmp_path / "twice", "dp=2,ep=2", 1, *longer, "--resume", capacity="1.0")
    figures = ("loss", "grad_norm", "expert_tokens", "validation_loss")
    last = [[record.get(name) for name in figures] for record in straight[-5:]]
    assert [[record.get(name) for name in figures] for record in both[-5:]] == last
    assert {record["epoch"] for record in both[-5:]} == {2}
