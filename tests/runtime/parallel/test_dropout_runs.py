"""Training with dropout: no mesh and no schedule changes the numbers, nor does a run that was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import UsageError
from quintsched.runtime import Engine
from quintsched.runtime.autograd.kv_store import Past
from quintsched.runtime.blocks.block_outlines import Blocks
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.parallel.context.context_parallel import Context
from quintsched.runtime.parallel.dropout import Masks
from quintsched.runtime.train.summed_losses import cross_entropy_sum

from ...helpers.jobs import COUNTING
from ..toys import CLASSES, Task, ids_task, sgd, share, train_on, train_plainly, worst_difference

LENGTH = 8


def noisy_gpt(dropout: float = 0.3) -> Blocks:
    return gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), GPTOptions(hidden=16, depth=4, dropout=dropout))


def noisy_vit() -> Blocks:
    return vit(DataSpec(input_shape=(1, 8, 8), num_classes=CLASSES), ViTOptions(hidden=16, depth=4, dropout=0.3))


# ---------------------------------------------------------------- the numbers of one process


def require_equality(plan: qs.Plan, blocks: Blocks, task: Task) -> None:
    microbatches = plan.schedule.microbatches * plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, microbatches, clip=1.0, dtype=torch.float64, masks=Masks(0))
    found = train_on(plan, task, blocks, clip=1.0, dtype=torch.float64, rules="nccl")
    assert worst_difference(found, alone) <= 1e-12


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        ("1f1b", "pp=1", {}),
        ("1f1b", "dp=2", {}),
        ("1f1b", "tp=2", {}),
        ("1f1b", "cp=2", {}),
        ("gpipe", "ep=2,pp=2", {"recompute": 2}),
        ("1f1b", "dp=2,pp=2,tp=2", {"recompute": 1}),
        ("interleaved-1f1b", "pp=2", {"chunks": 2}),
        ("zb-h1", "pp=2,cp=2", {}),
        ("zbv", "pp=2", {"recompute": 1}),
        ("dualpipe", "dp=2,pp=2", {}),
        ("seq-1f1b", "dp=2,pp=2", {"slices": 2}),
        ("seq-1f1b", "pp=2", {"slices": 4, "recompute": 1}),
    ],
)
def test_every_mesh_and_schedule_drops_what_one_process_drops(
    schedule: str, mesh: str, options: dict[str, Any]
) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=4, **options)
    require_equality(plan, noisy_gpt(), ids_task(2, 8, LENGTH))


def test_images_too() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2)
    require_equality(plan, noisy_vit(), Task.make(2, 8, torch.float64))


class Layouts(nn.Module):
    """Drops out of tokens, of heads, of tokens in one row, and of one vector per sample; of the first of them twice."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, CLASSES) if first else nn.Linear(CLASSES, CLASSES)
        self.drop, self.heads = nn.Dropout(0.4), nn.Dropout(0.3, inplace=True)
        self.flat, self.never = nn.Dropout(0.2), nn.Dropout(0.0)

    def forward(self, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        x = self.drop(self.tokens(x))
        x = x + self.drop(x.sin())
        heads = x.unflatten(-1, (2, -1)) * 1.5
        x = x + self.never(self.heads(heads).flatten(-2))
        out: Tensor = x + self.flat(x.flatten(0, 1)).view(x.shape)
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "mesh", "slices"),
    [("1f1b", "pp=1", 1), ("1f1b", "dp=2,pp=2", 1), ("1f1b", "cp=4", 1), ("seq-1f1b", "pp=2", 4)],
)
def test_tensors_of_any_layout_with_the_samples_first(schedule: str, mesh: str, slices: int) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, slices=slices)
    require_equality(plan, [lambda: Layouts(True), *[lambda: Layouts(False)] * 3], ids_task(2, 4, LENGTH))


def losses_of(seed: int = 0, *, before: Callable[[Engine], object] = lambda _: None) -> list[float]:
    """Train three steps on one batch at a rate of 0: only the masks differ."""
    task = ids_task(1, 8, LENGTH)

    def still(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    blocks = list(train_blocks())
    engine = Engine(plan, blocks, cross_entropy_sum, still, dtype=torch.float64, seed=seed)
    before(engine)
    return [engine.step(task.inputs[0], task.targets[0]).loss.item() for _ in range(3)]


def train_blocks() -> list[nn.Module]:
    """Built blocks, so that a seed decides the masks only."""
    torch.manual_seed(0)
    return [build() for build in noisy_gpt() if not isinstance(build, nn.Module)]


def test_two_runs_are_the_same_and_another_seed_or_step_is_not() -> None:
    losses = losses_of()
    assert losses == losses_of()
    assert len({*losses, *losses_of(seed=1)}) == 6
    other = losses_of(
        before=lambda engine: engine.load_state_dict({**engine.state_dict(), "engine.step": torch.tensor(1)})
    )
    assert other[:2] == losses[1:]


def test_evaluation_drops_nothing_and_leaves_no_trace() -> None:
    task = ids_task(2, 8, LENGTH)
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def run(transport: Transport, evaluates: bool, dropout: float) -> tuple[float, list[float]]:
        engine = Engine(plan, noisy_gpt(dropout), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        batches = [share(engine, *batch) for batch in zip(task.inputs, task.targets, strict=True)]
        first = engine.evaluate(*batches[0]).loss.item() if evaluates else 0.0
        losses = []
        for batch in batches:
            losses.append(engine.step(*batch).loss.item())
            if evaluates:
                engine.evaluate(*batch)
        return first, losses

    (evaluated, losses), _ = run_local(2, lambda t: run(t, True, 0.3))
    assert losses == run_local(2, lambda t: run(t, False, 0.3))[0][1]
    plain, plain_losses = run_local(2, lambda t: run(t, True, 0.0))[0]
    assert evaluated == plain
    assert losses != plain_losses


# ---------------------------------------------------------------- jobs

JOB = """
model: {name: gpt, options: {hidden: 32, depth: 2, dropout: 0.1}}
data: {name: "DATA:load"}
parallel: {mesh: "MESH", microbatches: 2}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}}
runtime: {transport: local, precision: float64}
log: {path: LOG, every: 1}
"""


def test_a_job_with_dropout_trains_to_the_same_losses_on_other_meshes(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(COUNTING)
    losses: list[list[float]] = []
    for mesh, extra in (("pp=1", []), ("dp=1,pp=2,tp=2", []), ("cp=2", []), ("pp=1", ["model.options.dropout=0.0"])):
        job, log = tmp_path / "job.yaml", tmp_path / f"{len(losses)}.jsonl"
        text = JOB.replace("DATA", str(tmp_path / "data.py")).replace("MESH", mesh).replace("LOG", str(log))
        job.write_text(text)
        assert main(["--config", str(job), *(word for setting in extra for word in ("--set", setting))]) == 0
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses.append([r["loss"] for r in records if r["event"] == "step"])
    assert len(losses[0]) > 2
    for others in losses[1:3]:
        assert others == pytest.approx(losses[0], abs=1e-10)
    assert losses[3] != pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
@pytest.mark.parametrize("kind", [GPTOptions, ViTOptions])
def test_a_share_that_is_none_is_refused(kind: Callable[..., object], dropout: float) -> None:
    with pytest.raises(UsageError, match="dropout"):
        kind(dropout=dropout)
