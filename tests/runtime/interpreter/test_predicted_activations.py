"""Live activations as predicted: to the byte what autograd saves on every rank, whatever the schedule and the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.strategies.descriptions.hardware import Hardware, Measured
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import held

VOCAB, SEQ, DEPTH, HIDDEN, HEADS, SAMPLES = 64, 16, 4, 32, 4, 2
GPT = Model(layers=DEPTH, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ, tied=False, dropout=False)
LLAMA = GPT.model_copy(update={"kv_heads": 2, "activation": "swiglu", "norm": "rmsnorm", "positions": "rope"})
CPU = Hardware(
    tflops={"fp32": 1, "bf16": 1}, memory_gb=1, memory_gbps=1, link_gbps=1, network_gbps=1, measured=Measured(cores=2)
)
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


def _expected(plan: qs.Plan, model: Model, options: dict[str, Any]) -> list[float]:
    mesh, schedule = plan.mesh, plan.schedule
    strategy = Strategy(
        gpus=mesh.size,
        **{axis: mesh.axis_size(axis) for axis in ("dp", "tp", "pp", "cp")},
        microbatch=SAMPLES,
        batch=SAMPLES * schedule.microbatches * mesh.axis_size("dp"),
        seq=SEQ,
        schedule=schedule.name,
        chunks=schedule.chunks,
        dtype="bf16" if "dtype" in options else "fp32",
        sequence_parallel=options.get("sequence_parallel", False),
    )
    terms, _ = held(model, CPU, Table.from_strategies([strategy]), each_rank=True)
    kept = sum(bytes_[0] for name, bytes_ in terms.items() if name.startswith("activations") or name == "logits")
    return [float(kept[mesh.coordinates(rank).get("pp", 0)]) for rank in range(mesh.size)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("schedule", "mesh", "model", "microbatches", "options"), CASES)
def test_autograd_saves_so_many_bytes(
    schedule: str, mesh: str, model: Model, microbatches: int, options: dict[str, Any]
) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=microbatches)
    assert _counted(plan, model, options) == _expected(plan, model, options)
