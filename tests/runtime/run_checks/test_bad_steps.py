"""Steps whose gradients are not finite: how many are skipped, and where it is said that the numbers arose."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import NotFiniteError, UsageError
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.train.trainer import Trainer

from ...helpers.jobs import data_file, job
from ..toys import sgd

__all__ = ["data_file"]

mse = nn.functional.mse_loss
WIDTH, BLOCKS, SAMPLES, MICROBATCHES = 4, 4, 8, 4
X = torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)


class Spoiled(torch.autograd.Function):
    """Passes on what it is given; its gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


class Block(nn.Module):
    """Spoils a microbatch of which a number is above 100: its output, its gradient (before it, or as it
    comes back), or nothing."""

    def __init__(self, number: int, spoils: str = "") -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer, self.spoils = nn.Linear(WIDTH, WIDTH), spoils

    def forward(self, x: Tensor) -> Tensor:
        out = x + 0.1 * torch.tanh(self.layer(x))
        if not self.spoils or x.is_meta or float(x.detach().max()) < 100:
            return out
        if self.spoils == "hook":
            out.register_hook(lambda gradient: gradient * math.nan)
            return out
        return Spoiled.apply(out) if self.spoils == "gradient" else out / 0  # type: ignore[no-any-return]


def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
    return mse(output, targets)


def bad_loss(output: Tensor, targets: Tensor) -> Tensor:
    return mse(output, targets) / (0.0 if not output.is_meta and float(output.detach().max()) > 100 else 1.0)


def spoiled_batch(microbatch: int, value: float = 1000.0) -> Tensor:
    batch = X.clone()
    batch[microbatch * SAMPLES // MICROBATCHES, 1] = value
    return batch


def stopped(
    mesh: str,
    batch: Tensor,
    spoils: tuple[int, str] | None = None,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_fn,
    max_skipped: int = 2,
    steps: int = 6,
    before: int = 0,
    spike_dir: Path | None = None,
    change: Callable[[Engine], None] = lambda engine: None,
    schedule: str = "1f1b",
    **options: Any,
) -> tuple[int, str]:
    """Return how many steps were made, and what all ranks say in the end."""
    plan = qs.compile(schedule, mesh=mesh, microbatches=MICROBATCHES, **options)

    def run(transport: Transport) -> tuple[int, str]:
        blocks = [Block(n, spoils[1] if spoils and n == spoils[0] else "") for n in range(BLOCKS)]
        engine = Engine(plan, blocks, loss, sgd, max_skipped=max_skipped, spike_dir=spike_dir, transport=transport)
        for _ in range(before):
            engine.step(X, X)
        change(engine)
        for step in range(steps):
            try:
                engine.step(
                    batch.chunk(engine.num_replicas)[engine.replica], X.chunk(engine.num_replicas)[engine.replica]
                )
            except NotFiniteError as error:
                return step + 1, str(error)
        return steps, "went on"

    (said,) = set(run_local(plan.mesh.size, run))
    return said


def test_inputs_that_are_not_finite_stop_the_run_after_so_many_steps() -> None:
    steps, words = stopped("pp=2", spoiled_batch(2, math.nan), max_skipped=3)
    assert steps == 3
    assert "the gradients of 3 steps in a row were not finite" in words
    assert "the last is step 3. Run again, the first numbers that are not finite are in the inputs: " in words
    assert "rank 0 (pp=0), microbatch 2: 1 nan among 8 numbers" in words
    assert "not written down" in words


def test_zero_allows_any_number() -> None:
    assert stopped("pp=2", spoiled_batch(2, math.nan), max_skipped=0) == (6, "went on")
    with pytest.raises(UsageError, match="max_skipped: input should be greater than or equal to 0, not -1"):
        stopped("pp=1", X, max_skipped=-1)


def test_good_steps_between_are_counted_from_the_start() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=MICROBATCHES)
    engine = Engine(plan, [Block(n) for n in range(2)], loss_fn, sgd, max_skipped=2)
    for _ in range(4):
        assert engine.step(spoiled_batch(0, math.nan), X).skipped
        assert not engine.step(X, X).skipped
    engine.step(spoiled_batch(0, math.nan), X)
    with pytest.raises(NotFiniteError, match="step 10"):
        engine.step(spoiled_batch(0, math.nan), X)


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2", "pp=4", "dp=2,pp=2"])
def test_the_block_and_the_microbatch_are_named(mesh: str) -> None:
    _, words = stopped(mesh, spoiled_batch(3), (2, "output"))
    replicas = 2 if "dp" in mesh else 1
    stages = {"pp=1": 1, "pp=4": 4}.get(mesh, 2)
    stage = 2 * stages // BLOCKS
    microbatch = 3 if replicas == 1 else 2  # the second replica has the second half, two samples each
    rank = stage + (stages if replicas > 1 else 0)
    assert "are in the activations: " in words
    assert f"rank {rank} (" in words
    assert f"stage {stage}, block 2 (Block), microbatch {microbatch}" in words
    assert "inf among" in words


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("mesh", ["pp=1", "pp=2", "pp=4"])
def test_a_gradient_that_is_not_finite_is_named(mesh: str, schedule: str) -> None:
    _, words = stopped(mesh, spoiled_batch(1), (2, "gradient"), schedule=schedule)
    assert "are in the gradients: " in words
    assert "block 2 (Block), microbatch 1" in words


def test_a_block_that_is_run_again_is_looked_at_too() -> None:
    _, words = stopped("pp=2", spoiled_batch(1), (2, "gradient"), recompute=1)
    assert "block 2 (Block), microbatch 1" in words
    _, words = stopped("pp=2", spoiled_batch(1), (2, "output"), recompute=1)
    assert "are in the activations: rank 1 (pp=1), stage 1, block 2 (Block), microbatch 1" in words


def test_a_loss_that_is_not_finite_is_named() -> None:
    _, words = stopped("pp=2", spoiled_batch(3), loss=bad_loss)
    assert "are in the loss: rank 1 (pp=1), the loss function, microbatch 3: the loss is inf" in words


def test_a_loss_weight_that_is_not_finite_is_named() -> None:
    def weighed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        is_bad = not output.is_meta and float(output.detach().max()) > 100
        return (output - targets).square().sum(), targets.new_tensor(math.nan if is_bad else float(len(output)))

    for mesh in ("pp=2", "dp=2,pp=2"):
        _, words = stopped(mesh, spoiled_batch(3), loss=weighed)  # type: ignore[arg-type]
        assert "are in the loss: rank " in words
        assert ", the loss function, microbatch " in words
        assert ": the weight that it gives is nan. " in words


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_gradient_that_is_spoiled_at_the_end_of_a_stage_is_its_own(chunks: int) -> None:
    spoiled: dict[str, Any] = {"schedule": "interleaved-1f1b", "chunks": 2} if chunks == 2 else {}
    number = BLOCKS // (2 * chunks) - 1
    _, words = stopped("pp=2", spoiled_batch(1), (number, "hook"), **spoiled)
    assert "are in the gradients: rank 0 (pp=0), stage 0, " in words
    assert f"block {number} (Block), microbatch 1: gradient of its output, which was finite as the next stage" in words


def test_weights_that_are_not_finite_come_before_all_else() -> None:
    def spoil(engine: Engine) -> None:
        engine.set_weights({"1.layer.bias": torch.full((WIDTH,), math.nan)})

    for zero in (0, 3):
        _, words = stopped("dp=2,pp=2", spoiled_batch(3, math.nan), change=spoil, before=1, zero=zero)
        assert "are in the weights: rank 0 (dp=0, pp=0), stage 0, block 1 (Block): 1.layer.bias: " in words


def test_no_targets_that_count_are_said() -> None:
    def weighed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (output - targets).square().sum() * 0, targets.new_zeros(())

    _, words = stopped("pp=2", X, loss=weighed)  # type: ignore[arg-type]
    assert "its total weight is 0" in words


def test_the_batch_is_written_down(tmp_path: Path) -> None:
    _, words = stopped("dp=2,pp=2", spoiled_batch(3, math.nan), spike_dir=tmp_path / "spikes")
    paths = [tmp_path / "spikes" / f"not-finite-step-00000002-rank-0000{rank}.safetensors" for rank in (2, 3)]
    assert f"Its batch is in {paths[0]}, {paths[1]}." in words
    inputs, targets = map(load_file, paths)
    assert torch.cat([inputs[f"inputs.{unit}.0"] for unit in range(4)]).isnan().sum() == 1
    assert torch.equal(torch.cat([targets[f"targets.{unit}.0"] for unit in range(4)]), X.chunk(2)[1])


def test_a_batch_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, words = stopped("pp=1", spoiled_batch(3, math.nan), spike_dir=tmp_path / "file")
    assert "Its batch is in no file, as " in words


def test_a_part_of_an_accumulated_step_is_found() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=MICROBATCHES)

    def run(transport: Transport) -> None:
        engine = Engine(plan, [Block(n) for n in range(BLOCKS)], loss_fn, sgd, max_skipped=1, transport=transport)
        engine.step(spoiled_batch(3, math.nan), X, last=False)
        with pytest.raises(NotFiniteError, match=r"are in the inputs: rank 0 \(pp=0\), microbatch 3"):
            engine.step(X, X)

    run_local(2, run)


def test_a_scale_above_one_explains_an_overflow() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=MICROBATCHES)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    engine = Engine(plan, [Block(0)], loss_fn, sgd, max_skipped=2, grad_scaler=scaler)
    for _ in range(3):  # by scales of 4, 2 and 1, and the last leaves 0.5: the first that counts
        assert engine.step(spoiled_batch(0, math.nan), X).skipped
    with pytest.raises(NotFiniteError, match="step 4"):
        engine.step(spoiled_batch(0, math.nan), X)


def test_a_job_says_so_and_writes_beside_its_log(data_file: Path, tmp_path: Path) -> None:
    data_file.write_text(
        data_file.read_text()
        .replace("    return Dataset(", "    bad = split(train)\n    bad.inputs[:] = np.nan\n    return Dataset(")
        .replace("train=split(train)", "train=bad")
    )
    config = job(data_file, log={"path": str(tmp_path / "log.jsonl")}, train={"max_skipped": 3})
    plan = plan_of(config)
    with pytest.raises(
        NotFiniteError, match=r"3 steps in a row .*the last is step 3.* microbatch 0, replica 0"
    ) as stop:
        run_local(4, lambda transport: Trainer.of_job(config, plan, transport).fit())
    assert stop.value.exit_code == 1
    assert f"{tmp_path}/not-finite-step-00000003-rank-00000.safetensors" in str(stop.value)
