"""Runs beyond the mesh matrix train as one process does: other schedules, recomputed parts, and ways to attend.

The mesh matrix has all meshes, with experts, masks, tied weights and the parts of Llama and Qwen, in three schedules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.vit import ViTOptions, vit
from tests.compiling import torch_compiles

from ..toys import CLASSES, Task, ids_task
from .expert.moe_training import require_equality
from .lively import LENGTH, LLAMA, TIES, lively_gpt

GPT, MOE = "gpt", "experts"
SP = {"sequence_parallel": True}
RUNS: list[tuple[str, str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = [
    ("zbv", "pp=2", {"recompute": 1}, GPT, {}, {}),
    ("dualpipe", "dp=2,pp=2", {}, GPT, {}, {}),
    ("seq-1f1b", "dp=2,pp=2", {"slices": 2}, GPT, {}, {}),
    ("seq-1f1b", "pp=2", {"slices": 4, "recompute": 1}, GPT, {}, {}),
    ("seq-1f1b", "pp=2,tp=2", {"slices": 2}, GPT, {}, SP),
    ("zbv", "pp=2,tp=2", {}, GPT, {}, SP),
    ("dualpipe", "pp=2,tp=2,dp=2", {}, GPT, {}, SP),
    ("1f1b", "pp=2,tp=2", {"recompute": 3}, GPT, {}, SP),
    ("interleaved-1f1b", "tp=2,pp=2", {"chunks": 2, "recompute": 1}, GPT, LLAMA, SP),
    ("1f1b", "cp=4", {}, GPT, {"heads": 8}, {"context": "ulysses"}),
    ("1f1b", "cp=2,dp=2,tp=2", {}, GPT, {}, {"context": "gather"}),
    ("zb-h1", "pp=2,cp=2,tp=2", {"recompute": 1}, GPT, LLAMA, {"context": "ulysses"}),
    ("zb-h1", "cp=2,pp=2,tp=2", {}, GPT, LLAMA, {"context": "gather", **SP}),
    ("interleaved-1f1b", "cp=2,pp=2", {"chunks": 2, "recompute": 1}, GPT, {}, {"context": "gather"}),
    ("zbv", "pp=2,cp=2", {}, GPT, {}, {"context": "ring"}),
    ("dualpipe", "cp=2,pp=2", {}, GPT, {}, {"context": "ulysses"}),
    ("1f1b", "pp=2,cp=2", {"tied": {"embedding": (0, 1)}}, GPT, {"tied": True}, {"context": "gather"}),
    ("gpipe", "ep=2,cp=2", {"recompute": 1}, MOE, {"dropout": 0.2}, {"context": "ulysses"}),
    ("gpipe", "ep=2,pp=2", {"recompute": 2}, MOE, {"dropout": 0.2}, {}),
    ("zb-h1", "dp=2,pp=2,ep=2", {"recompute": 1}, MOE, {}, {}),
    ("interleaved-1f1b", "ep=2,pp=2", {"chunks": 2, "recompute": 1}, MOE, {}, {}),
    ("zbv", "pp=2,ep=2", {}, MOE, {"shared_experts": 1}, {}),
    ("dualpipe", "ep=2,pp=2", {}, MOE, {}, {}),
    ("1f1b", "dp=2,ep=2,pp=2", {"buckets_per_stage": 2}, MOE, {"top_k": 1, "every": 2, "experts": 8}, {}),
    ("1f1b", "ep=2,tp=2,pp=2", {"recompute": 1}, MOE, LLAMA | {"shared_experts": 2, "renormalise": True}, SP),
    ("interleaved-1f1b", "ep=2,pp=2,tp=2", {"chunks": 2}, MOE, {}, SP | {"rules": {"*.experts.*": "replicate"}}),
    ("1f1b", "dp=2,pp=2,tp=2", {"recompute": 1}, "vit", {}, {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_runs_equal_one_process(run: tuple[Any, ...]) -> None:
    schedule, mesh, shape, kind, options, more = run
    replicas = qs.Mesh.parse(mesh).axis_size("dp") * qs.Mesh.parse(mesh).axis_size("ep")
    plan = qs.compile(schedule, mesh=mesh, microbatches=4 if replicas <= 2 else 2, **shape)
    if kind == MOE:
        require_equality(plan, more, **options)
    elif kind == GPT:
        ties = TIES if options.get("tied") else {}
        blocks = lively_gpt(dropout=0.3, **{name: value for name, value in options.items() if name != "tied"})
        require_equality(plan, more, blocks=blocks, ties=ties, task=ids_task(2, 8, LENGTH))
    else:
        blocks = vit(DataSpec(input_shape=(1, 8, 8), num_classes=CLASSES), ViTOptions(hidden=16, depth=4, dropout=0.3))
        require_equality(plan, more, blocks=blocks, task=Task.make(2, 8, torch.float64))


@pytest.mark.slow
@torch_compiles
def test_compiled_stages_equal_one_process() -> None:
    plan = qs.compile("zb-h1", mesh="ep=2,dp=2", microbatches=2)
    require_equality(plan, {"compiled": True}, shared_experts=1)
