"""Weights, gradients and optimizer state as predicted: to the byte what the engine holds on every rank."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, gpt_tied, moe_gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.strategies.descriptions.model import Experts, Model
from quintsched.strategies.descriptions.strategy_validity import stage_layers
from quintsched.strategies.prediction.layers_of_ranks import stages_of_rank

from ..toys import adam, share
from .bucket_layout import BucketLayout, stage_tensors

VOCAB, SEQ, DEPTH, HIDDEN, HEADS = 96, 16, 4, 24, 4
DENSE = Model(layers=DEPTH, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ, tied=False, dropout=False)
TIED = DENSE.model_copy(update={"tied": True})
LLAMA = DENSE.model_copy(update={"kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm", "positions": "rope"})
MIXTURE = DENSE.model_copy(update={"experts": Experts(count=4, top_k=2, ffn=4 * HIDDEN, shared=1, every=2)})


@cache
def _blocks(model: Model) -> list[Any]:
    data = DataSpec(input_shape=(SEQ,), num_classes=VOCAB)
    told = {name: getattr(model, name) for name in ("kv_heads", "norm", "positions", "activation", "tied")}
    options: dict[str, Any] = {"hidden": HIDDEN, "depth": DEPTH, "heads": HEADS, **told}
    if model.experts is None:
        return gpt(data, GPTOptions(**options))
    return moe_gpt(data, MoEGPTOptions(**options, experts=4, top_k=2, shared_experts=1, every=2))


def _measured(plan: qs.Plan, model: Model, dtype: torch.dtype, *, sequence_parallel: bool) -> list[Any]:
    told: dict[str, Any] = {"bucket_mb": 0.02, "dtype": dtype, "sequence_parallel": sequence_parallel}
    told["tied"] = gpt_tied(GPTOptions(depth=DEPTH, tied=True)) if model.tied else {}
    told["block_costs"] = [0.0] + [1.0] * DEPTH + [0.0]  # stages share the layers out, not the blocks at both ends

    def run(transport: Transport) -> dict[str, int]:
        engine = Engine(plan, _blocks(model), cross_entropy_sum, adam, transport=transport, **told)
        ids = torch.zeros(24, SEQ, dtype=torch.int64)
        for _ in range(2):
            engine.step(*share(engine, ids, ids))
        found = engine.state_bytes()
        return {"weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer}

    return run_local(plan.mesh.size, run, timeout_s=60)


def _place(mesh: qs.Mesh, rank: int, axes: tuple[str, ...]) -> int:
    """Return the place of a rank among its replicas: row-major over the axes, in the mesh's order."""
    place = 0
    for axis, size in mesh.axes:
        if axis in axes:
            place = place * size + mesh.coordinates(rank)[axis]
    return place


def _expected(plan: qs.Plan, model: Model, rank: int, element: int, *, sequence_parallel: bool) -> dict[str, int]:
    mesh, schedule = plan.mesh, plan.schedule
    size = mesh.axis_size
    layout = BucketLayout(
        tp=size("tp"),
        ep=size("ep"),
        replicas=size("dp") * size("cp") * size("ep"),
        expert_replicas=size("dp") * size("cp"),
        replica=_place(mesh, rank, ("dp", "cp", "ep")),
        expert_replica=_place(mesh, rank, ("dp", "cp")),
        zero=plan.zero.stage,
        element=element,
        sequence_parallel=sequence_parallel,
        splits_backward=schedule.name.startswith("zb"),
        bucket_bytes=20_000,
    )
    count = mesh.pp * schedule.chunks
    ends = np.cumsum([0, *stage_layers(model.layers, count)])
    stages = [
        stage_tensors(model, layout, range(ends[s], ends[s + 1]), seq=SEQ, first=s == 0, last=s == count - 1)
        for s in stages_of_rank(mesh.coordinates(rank).get("pp", 0), mesh.pp, schedule.chunks, schedule.name)
    ]
    return layout.state_bytes(stages)


CASES = [
    ("1f1b", "dp=2", DENSE, False),
    ("1f1b", "dp=3", LLAMA, False),
    ("1f1b", "dp=2,pp=2", TIED, False),
    ("1f1b", "dp=2,tp=2", LLAMA, True),
    ("interleaved-1f1b", "dp=2,pp=2", DENSE, False),
    ("zb-h1", "dp=2,pp=2", DENSE, False),
    ("1f1b", "dp=2,cp=2", DENSE, False),
    ("1f1b", "dp=2,ep=2", MIXTURE, False),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "mesh", "model", "sequence_parallel"), CASES)
def test_the_runtime_holds_so_many_bytes(
    schedule: str, mesh: str, model: Model, sequence_parallel: bool, zero: int
) -> None:
    tied = {"embedding": (0, 1)} if model.tied and "pp" in mesh else {}
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, zero=zero, tied=tied)
    dtype, element = (torch.bfloat16, 2) if zero % 2 else (torch.float32, 4)
    found = _measured(plan, model, dtype, sequence_parallel=sequence_parallel)
    expected = [
        _expected(plan, model, rank, element, sequence_parallel=sequence_parallel) for rank in range(plan.mesh.size)
    ]
    assert found == expected
