"""Runs with tokens shared out over tp: on every mesh and schedule the same numbers as in one process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.blocks.block_outlines import Blocks, build_block
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.parallel.dropout import Masks

from ....helpers.jobs import COUNTING
from ...toys import Outcome, Task, ids_task, tiny_vit, train_on, train_plainly, train_rank, worst_difference
from ..lively import LENGTH, TIES, lively_gpt

AXES = ("dp", "pp", "tp", "cp")
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "heads": 8, "kv_heads": 4}


def difference_on(
    plan: qs.Plan, task: Task, blocks: Blocks, dtype: torch.dtype = torch.float64, *, tied: bool = False, **more: Any
) -> float:
    """Train on a plan by NCCL's rules with tokens shared out, and in one process."""
    ties = TIES if tied else {}
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, replicas * plan.schedule.microbatches, clip=1.0, dtype=dtype, tied=ties)
    alone.weights.update({other: alone.weights[first] for first, *others in ties.values() for other in others})
    found = train_on(
        plan,
        task,
        blocks,
        clip=1.0,
        dtype=dtype,
        tied=ties,
        rules="nccl",
        bucket_mb=0.01,
        sequence_parallel=True,
        **more,
    )
    return worst_difference(found, alone)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", [sizes for sizes in product((1, 2), repeat=4) if sizes[2] > 1], ids=str)
def test_eight_meshes_equal_one_process(sizes: tuple[int, ...]) -> None:
    plan = qs.compile("1f1b", mesh=qs.Mesh(**dict(zip(AXES, sizes, strict=True))), microbatches=2)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt()) <= 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        ("zb-h1", "pp=2,tp=2", {}),
        ("zb-h1", "tp=4", {}),
        ("zb-h1", "pp=2,tp=2,cp=2", {"recompute": 1}),
        ("interleaved-1f1b", "tp=2,pp=2", {"chunks": 2, "recompute": 1}),
        ("1f1b", "pp=2,tp=2", {"recompute": 3}),
        ("zbv", "pp=2,tp=2", {}),
        ("dualpipe", "pp=2,tp=2,dp=2", {}),
        ("seq-1f1b", "pp=2,tp=2", {"slices": 2}),
    ],
)
def test_other_schedules_equal_one_process(schedule: str, mesh: str, options: dict[str, int]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=4, **options)  # type: ignore[arg-type]
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt()) <= 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_the_parts_of_llama_equal_one_process(method: str) -> None:
    plan = qs.compile("zb-h1", mesh="cp=2,pp=2,tp=2", microbatches=2)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt(**LLAMA), context=method) <= 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        ("1f1b", "tp=2", {}),
        ("zb-h1", "dp=2,cp=2,tp=2", {}),
        ("interleaved-1f1b", "pp=2,tp=2", {"chunks": 2, "recompute": 1}),
        ("seq-1f1b", "pp=2,tp=2", {"slices": 2}),
    ],
)
def test_masks_of_dropouts_are_those_of_one_process(schedule: str, mesh: str, options: dict[str, int]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **options)  # type: ignore[arg-type]
    task, blocks = ids_task(2, 8, LENGTH), [*lively_gpt(dropout=0.3)[:-1], Dropping, lively_gpt()[-1]]
    microbatches = 2 * plan.mesh.axis_size("dp")
    alone = train_plainly(task, blocks, microbatches, dtype=torch.float64, masks=Masks(0))
    found = train_on(plan, task, blocks, dtype=torch.float64, rules="nccl", sequence_parallel=True)
    assert worst_difference(found, alone) <= 1e-12


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "tp=2"])
def test_tied_embeddings_equal_one_process(mesh: str) -> None:
    ties = {"embedding": (0, 1)} if "pp" in mesh else {}
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, tied=ties)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt(), tied=True) <= 1e-12


def test_in_single_precision() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2)
    assert difference_on(plan, ids_task(2, 8, LENGTH), lively_gpt(), torch.float32) <= 2e-5


def test_a_vision_transformer_where_its_tokens_divide() -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randn(2, 8, 1, 12, 4, generator=random, dtype=torch.float64)
    task = Task(images, torch.randint(0, 10, (2, 8), generator=random))
    options = ViTOptions(hidden=12, depth=2, heads=4, patch=4)
    blocks = vit(DataSpec(input_shape=(1, 12, 4), num_classes=10), options)  # three patches and the class token
    assert difference_on(qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2), task, blocks) <= 1e-12
    task = Task.make(2, 8, torch.float64)
    with pytest.raises(MisfitError, match=r"over tp=2, but block 0 leaves float64 \(4, 17, 16\), which does not div"):
        train_on(qs.compile("1f1b", mesh="tp=2", microbatches=2), task, tiny_vit(), sequence_parallel=True)


class Dropping(nn.Module):
    """An MLP that drops out before its pair, between the two, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.before, self.between, self.behind = nn.Dropout(0.2), nn.Dropout(0.3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.behind(self.fc2(self.between(self.fc1(self.before(x)).relu())))
        return out


class Deep(Dropping):
    """One whose dropout between the two stands deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.2))  # type: ignore[assignment]


class Beside(Dropping):
    """One with a product of its own behind the pair, whose features are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.before(self.beside(super().forward(x)))
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("block", "sequence_parallel"), [(Deep, True), (Deep, False), (Beside, False)])
def test_masks_belong_to_the_features_between_a_pair_only(block: type[nn.Module], sequence_parallel: bool) -> None:
    task, blocks = ids_task(2, 8, LENGTH), [*lively_gpt()[:-1], block, lively_gpt()[-1]]
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=2)
    rules = {"*.beside": "column"} if block is Beside else {}

    def run(transport: Transport) -> Outcome:
        more: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rules": rules}
        return train_rank(transport, plan, task, blocks, dtype=torch.float64, **more)

    alone = train_plainly(task, blocks, 2, dtype=torch.float64, masks=Masks(0))
    assert worst_difference(run_local(2, run), alone) <= 1e-12


def test_blocks_that_are_modules_are_outlined_before_they_are_cut() -> None:
    task, blocks = ids_task(2, 8, LENGTH), lively_gpt(**LLAMA)
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)

    def run(transport: Transport) -> Outcome:
        modules = [build_block(block, number, 0, torch.float64) for number, block in enumerate(blocks)]
        return train_rank(transport, plan, task, modules, dtype=torch.float64, sequence_parallel=True)

    assert worst_difference(run_local(4, run), train_plainly(task, blocks, 2, dtype=torch.float64)) <= 1e-12


JOB = """
model: {name: gpt, options: {hidden: 16, depth: 2, tied: true}}
data: {name: "DATA:load"}
parallel: {mesh: "MESH", microbatches: 2, MORE}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}}
runtime: {transport: local, precision: float64}
log: {path: LOG, every: 1}
"""


def test_a_job_shares_out_tokens_and_cuts_by_rules(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(COUNTING)
    losses: list[list[float]] = []
    more = ["sequence_parallel: true", "rules: {'*.attention.*': replicate, '3.head': row}"]
    for mesh, setting in (("pp=1", ""), ("pp=2,tp=2", more[0]), ("tp=2", more[1])):
        job, log = tmp_path / "job.yaml", tmp_path / f"{len(losses)}.jsonl"
        text = JOB.replace("DATA", str(tmp_path / "data.py")).replace("MESH", mesh)
        job.write_text(text.replace("MORE", setting).replace("LOG", str(log)))
        assert main(["--config", str(job)]) == 0
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses.append([r.get("validation_loss", r["loss"]) for r in records if r["event"] in ("step", "epoch")])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
    assert losses[2] == pytest.approx(losses[0], abs=1e-10)
