"""Sequences shared out over ranks: on every mesh with cp a causal transformer equals the same model in one process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_outlines import Blocks
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.launch.worker import main
from quintsched.runtime.parallel.context.context_parallel import ContextMethod
from quintsched.runtime.train.summed_losses import correct_sum, cross_entropy_sum

from ....helpers.jobs import COUNTING
from ...matrix import CASES
from ...test_matrix_processes import require_equal, train
from ...toys import ids_task, sgd, share, tiny_gpt, tiny_vit, train_on, train_plainly, worst_difference
from ..lively import LENGTH, TIES, lively_gpt


def require_equality(plan: qs.Plan, context: ContextMethod = "ring", *, tied: bool = False, **options: Any) -> None:
    """Train on a plan by NCCL's rules, and in one process."""
    task, blocks, ties = ids_task(2, 8, LENGTH), lively_gpt(**options), TIES if tied else {}
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, replicas * plan.schedule.microbatches, clip=1.0, dtype=torch.float64, tied=ties)
    copies = {other: alone.weights[first] for first, *others in ties.values() for other in others}
    alone.weights.update(copies)
    found = train_on(
        plan, task, blocks, clip=1.0, dtype=torch.float64, tied=ties, rules="nccl", context=context, bucket_mb=0.01
    )
    assert worst_difference(found, alone) <= 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", list(product((1, 2), repeat=4)), ids=str)
def test_sixteen_meshes_equal_one_process(sizes: tuple[int, ...]) -> None:
    mesh = qs.Mesh(**dict(zip(("dp", "pp", "tp", "cp"), sizes, strict=True)))
    require_equality(qs.compile("1f1b", mesh=mesh, microbatches=2))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("context", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("mesh", ["cp=4", "cp=2,pp=2", "cp=2,dp=2,tp=2"])
def test_every_method_equals_one_process(context: ContextMethod, mesh: str) -> None:
    require_equality(qs.compile("1f1b", mesh=mesh, microbatches=2), context)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("context", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize(
    ("schedule", "mesh", "chunks", "recompute"),
    [
        ("zb-h1", "pp=2,cp=2", None, 0),
        ("zb-h1", "pp=2,cp=2,tp=2", None, 1),
        ("interleaved-1f1b", "cp=2,pp=2", 2, 1),
        ("zbv", "pp=2,cp=2", None, 0),
        ("dualpipe", "cp=2,pp=2", None, 0),
        ("gpipe", "ep=2,cp=2", None, 1),
    ],
)
def test_other_schedules_equal_one_process(
    context: ContextMethod, schedule: str, mesh: str, chunks: int | None, recompute: int
) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=4, chunks=chunks, recompute=recompute)
    require_equality(plan, context)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tied_weights_equal_one_process(schedule: str) -> None:
    plan = qs.compile(schedule, mesh="pp=2,cp=2", microbatches=2, tied={"embedding": (0, 1)})
    require_equality(plan, tied=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("context", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("mesh", ["cp=2,pp=2", "tp=2,cp=2"])
def test_rotary_positions_and_grouped_queries_equal_one_process(context: ContextMethod, mesh: str) -> None:
    plan = qs.compile("zb-h1", mesh=mesh, microbatches=2)
    options = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "heads": 8, "kv_heads": 4}
    require_equality(plan, context, **options)  # type: ignore[arg-type]


def test_six_ranks_and_longer_sequences() -> None:
    task, blocks = ids_task(2, 2, 36), lively_gpt(36)
    plan = qs.compile("1f1b", mesh="cp=3,pp=2", microbatches=2)
    found = train_on(plan, task, blocks, dtype=torch.float64, rules="nccl")
    assert worst_difference(found, train_plainly(task, blocks, 2, dtype=torch.float64)) <= 1e-12


def engine_on(transport: Transport, plan: qs.Plan, blocks: Blocks) -> Engine:
    return Engine(
        plan,
        blocks,
        cross_entropy_sum,
        sgd,
        metrics={"accuracy": correct_sum},
        dtype=torch.float64,
        transport=transport,
    )


def test_loss_metrics_and_evaluation_count_every_token_once() -> None:
    task, blocks = ids_task(2, 8, LENGTH), lively_gpt()

    def figures(mesh: str, microbatches: int) -> list[tuple[float, ...]]:
        def run(transport: Transport) -> list[float]:
            engine = engine_on(transport, qs.compile("1f1b", mesh=mesh, microbatches=microbatches), blocks)
            given = share(engine, task.inputs[0], task.targets[0])
            steps = [engine.evaluate(*given), engine.step(*given), engine.evaluate(*given)]
            return [x for s in steps for x in (s.loss.item(), s.metrics["accuracy"].item())]

        return [tuple(found) for found in run_local(qs.Mesh.parse(mesh).size, run)]

    expected = figures("pp=1", 4)[0]
    for found in figures("dp=2,cp=2", 2) + figures("cp=2,pp=2", 4):
        assert found == pytest.approx(expected, rel=1e-12)


class Shifted(nn.Module):
    """Embeds, and adds what a step brings along: per token, and per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 10)

    def forward(self, ids: Tensor, along: Tensor, each: Tensor, context: object = None) -> Tensor:
        shifted: Tensor = self.tokens(ids) + along[..., None] + each[:, None, None]
        return shifted


def test_extras_are_cut_along_the_sequence_unless_they_are_one_number_per_sample() -> None:
    task = ids_task(1, 4, LENGTH)
    along, each = torch.randn(4, LENGTH, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def loss_on(mesh: str, wrong: Tensor | None = None) -> float:
        def run(transport: Transport) -> float:
            engine = engine_on(transport, qs.compile("1f1b", mesh=mesh, microbatches=2), [Shifted])
            extra = along if wrong is None else wrong
            return engine.step(task.inputs[0], task.targets[0], along=extra, each=each).loss.item()

        return run_local(qs.Mesh.parse(mesh).size, run)[0]

    assert loss_on("cp=2") == pytest.approx(loss_on("pp=1"), rel=1e-12)
    with pytest.raises(qs.MisfitError, match=r"along of shape \(4, 8\) does not run along the sequence of 16"):
        loss_on("cp=2", along[:, :8])


def test_what_does_not_fit_is_refused() -> None:
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    with pytest.raises(qs.MisfitError, match="mesh cp=2 cuts sequences over cp, but no block takes `context`"):
        train_on(plan, ids_task(1, 4, 8), tiny_vit())
    with pytest.raises(qs.MisfitError, match=r"\(4, 10\).* sequence that divides into 4 equal chunks, .* of cp=2"):
        train_on(plan, ids_task(1, 4, 10), tiny_gpt(10), dtype=torch.float64)
    sliced = qs.compile("seq-1f1b", mesh="pp=2,cp=2", microbatches=2, slices=2)
    with pytest.raises(
        qs.UsageError, match=r"over cp, and seq-1f1b cuts it into 2 slices; a run does one or the other"
    ):
        train_on(sliced, ids_task(1, 4, 8), tiny_gpt(8))
    with pytest.raises(qs.MisfitError, match="built for 12 positions; a sequence has 16"):
        train_on(plan, ids_task(1, 4, 16), tiny_gpt(12), dtype=torch.float64)


JOB = """
model: {name: gpt, options: {hidden: 32, depth: 2, tied: true}}
data: {name: "DATA:load"}
parallel: {mesh: "MESH", microbatches: 2, context: CONTEXT}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}}
runtime: {transport: local, precision: float64}
log: {path: LOG, every: 1}
"""


def test_a_job_trains_on_parts_of_its_sequences_to_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(COUNTING)
    losses: list[list[float]] = []
    for mesh, context in (("pp=1", "ring"), ("cp=2,pp=2", "ring"), ("cp=4", "ulysses")):
        job, log = tmp_path / "job.yaml", tmp_path / f"{len(losses)}.jsonl"
        text = JOB.replace("DATA", str(tmp_path / "data.py")).replace("MESH", mesh)
        job.write_text(text.replace("CONTEXT", context).replace("LOG", str(log)))
        assert main(["--config", str(job)]) == 0
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses.append([r.get("validation_loss", r["loss"]) for r in records if r["event"] in ("step", "epoch")])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
    assert losses[2] == pytest.approx(losses[0], abs=1e-10)


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    cases = [case for case in CASES if case.mesh == "cp=2"]
    both: tuple[Rules, ...] = ("rendezvous", "nccl")
    runs = [(rules, case) for rules in both for case in cases]
    assert len(runs) == 4
    require_equal(train(tmp_path, 2, runs, timeout_s=100))
