"""Live activations as predicted: to the byte what autograd saves on every rank, whatever the schedule and the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.descriptions.model import Model
from quintsched.prediction.memory.activations import Sizes, block_kept, embedding_kept, head_kept
from quintsched.prediction.memory.eager import eager_block, eager_embedding, eager_head
from quintsched.prediction.memory.in_flight import first_in_flight, in_flight, logits_in_flight
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.losses import cross_entropy_sum

VOCAB, SEQ, DEPTH, HIDDEN, HEADS, SAMPLES = 64, 16, 4, 32, 4, 2
GPT = Model(layers=DEPTH, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ, tied=False, dropout=False)
LLAMA = GPT.model_copy(update={"kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm", "positions": "rope"})
DROPPING = GPT.model_copy(update={"dropout": True})

CASES: list[tuple[str, str, Model, int, dict[str, Any]]] = [
    ("1f1b", "pp=1", GPT, 2, {}),
    ("1f1b", "pp=2", GPT, 4, {}),
    ("1f1b", "pp=4", LLAMA, 8, {}),
    ("gpipe", "pp=2", GPT, 3, {}),
    ("gpipe", "pp=2", LLAMA, 3, {"dtype": torch.bfloat16}),
    ("interleaved-1f1b", "pp=2", GPT, 4, {}),
    ("1f1b", "pp=2,tp=2", GPT, 4, {}),
    ("1f1b", "pp=2,tp=2", LLAMA, 4, {}),
    ("1f1b", "pp=2,tp=2", GPT, 4, {"sequence_parallel": True}),
    ("1f1b", "pp=2", DROPPING, 4, {}),
    ("1f1b", "pp=2,tp=2", DROPPING, 4, {"sequence_parallel": True}),
    ("1f1b", "dp=2,pp=2", GPT, 4, {}),
    ("eager-1f1b", "pp=2", GPT, 4, {}),
]


def _counted(plan: qs.Plan, model: Model, options: dict[str, Any]) -> list[int]:
    given = GPTOptions(
        hidden=HIDDEN,
        depth=DEPTH,
        heads=HEADS,
        kv_heads=model.kv_heads,
        norm=model.norm,
        positions=model.positions,
        activation=model.activation,
        dropout=0.1 if model.dropout else 0.0,
    )
    blocks = gpt(DataSpec(input_shape=(SEQ,), num_classes=VOCAB), given)

    def run(transport: Transport) -> int:
        engine = Engine(
            plan,
            blocks,
            cross_entropy_sum,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            block_costs=[0.0] + [1.0] * DEPTH + [0.0],
            transport=transport,
            **options,
        )
        ids = torch.zeros(SAMPLES * plan.schedule.microbatches, SEQ, dtype=torch.int64)
        _, counted = engine.step_counting_saved(
            ids if engine.needs_inputs else None, ids if engine.needs_targets else None
        )
        return counted.peak

    return run_local(plan.mesh.size, run, timeout_s=60)


def _expected(plan: qs.Plan, model: Model, rank: int, options: dict[str, Any]) -> float:
    mesh, schedule = plan.mesh, plan.schedule
    pp_rank = mesh.coordinates(rank).get("pp", 0)
    sizes = Sizes(
        SAMPLES,
        SEQ,
        tp=mesh.axis_size("tp"),
        cp=mesh.axis_size("cp"),
        sequence_parallel=int(options.get("sequence_parallel", False)),
        element=options.get("dtype", torch.float32).itemsize,
    )
    flight = in_flight(
        schedule.name, pp=mesh.pp, microbatches=schedule.microbatches, chunks=schedule.chunks, rank=pp_rank
    )
    layer = sum(block_kept(model, sizes).values()) + eager_block(model, sizes)
    found = DEPTH / mesh.pp * flight * layer
    if pp_rank == 0:
        first = first_in_flight(schedule.name, pp=mesh.pp, microbatches=schedule.microbatches, chunks=schedule.chunks)
        found += first * (embedding_kept(model, sizes) + eager_embedding(model, sizes))
    if pp_rank == mesh.pp - 1:
        logits = logits_in_flight(schedule.name, microbatches=schedule.microbatches)
        found += logits * (sum(head_kept(model, sizes).values()) + eager_head(model, sizes))
    return float(found)


@pytest.mark.parametrize(("schedule", "mesh", "model", "microbatches", "options"), CASES)
def test_autograd_saves_so_many_bytes(
    schedule: str, mesh: str, model: Model, microbatches: int, options: dict[str, Any]
) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=microbatches)
    expected = [_expected(plan, model, rank, options) for rank in range(plan.mesh.size)]
    assert _counted(plan, model, options) == expected
