"""Steps whose gradients are not finite: how many are skipped, and where it is said that the numbers arose."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, Trainer, plan_of, run_local

from ...helpers.jobs import job
from ...helpers.training import call_with_share, run_engines
from ..examine.backward_blocks import backward_of
from ..toys import sgd

WIDTH, BLOCKS, SAMPLES, MICROBATCHES = 4, 4, 8, 4
X = torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)


spoiled = backward_of(lambda gradient: gradient * math.inf)
"""Passes on what it is given; its gradient is not finite."""


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
        return spoiled(out) if self.spoils == "gradient" else out / 0


def bad_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets) / (0.0 if not output.is_meta and float(output.detach().max()) > 100 else 1.0)


def spoiled_batch(microbatch: int, value: float = 1000.0) -> Tensor:
    batch = X.clone()
    batch[microbatch * SAMPLES // MICROBATCHES, 1] = value
    return batch


def stopped(
    mesh, batch, spoils=None, *, loss=F.mse_loss, steps=6, before=0, change=lambda engine: None, engine=None, **compiled
) -> tuple[int, str]:
    """Return how many steps were made, and what all ranks say in the end."""
    plan = qs.compile(**{"schedule": "1f1b"} | compiled, mesh=mesh, microbatches=MICROBATCHES)

    def blocks() -> list[Block]:
        return [Block(n, spoils[1] if spoils and n == spoils[0] else "") for n in range(BLOCKS)]

    def run(engine: Engine) -> tuple[int, str]:
        for _ in range(before):
            engine.step(X, X)
        change(engine)
        for step in range(steps):
            try:
                call_with_share(engine, engine.step, (batch, X))
            except qs.NotFiniteError as error:
                return step + 1, str(error)
        return steps, "went on"

    (said,) = set(run_engines(plan, blocks, run, loss, sgd, **{"max_skipped": 2} | (engine or {})))
    return said


def test_inputs_that_are_not_finite_stop_the_run_after_so_many_steps() -> None:
    steps, words = stopped("pp=2", spoiled_batch(2, math.nan), engine={"max_skipped": 3})
    assert steps == 3
    assert "the gradients of 3 steps in a row were not finite" in words
    assert "the last is step 3. Run again, the first numbers that are not finite are in the inputs: " in words
    assert "rank 0 (pp=0), microbatch 2: 1 nan among 8 numbers" in words
    assert "not written down" in words


def weighed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    is_bad = not output.is_meta and float(output.detach().max()) > 100
    return (output - targets).square().sum(), targets.new_tensor(math.nan if is_bad else float(len(output)))


NANS = torch.full((WIDTH,), math.nan)
ACTIVATIONS, GRADIENTS = "are in the activations: rank ", "are in the gradients: rank "
IN_TWO = {"schedule": "interleaved-1f1b", "chunks": 2}
OF_OUTPUT = "microbatch 1: gradient of its output, which was finite as the next stage"
OF_WEIGHTS = "are in the weights: rank 0 (dp=0, pp=0), stage 0, block 1 (Block): 1.layer.bias: "
OF_LOSS = ", the loss function, microbatch "
NAMED: list[tuple[str, tuple[int, str] | None, int, dict[str, Any], tuple[str, ...]]] = [
    ("pp=4", (2, "output"), 3, {}, (f"{ACTIVATIONS}2 (", "stage 2, block 2 (Block), microbatch 3", "inf among")),
    # the second replica has the second half, two samples each
    ("dp=2,pp=2", (2, "output"), 3, {}, (f"{ACTIVATIONS}3 (", "stage 1, block 2 (Block), microbatch 2")),
    ("pp=2", (2, "output"), 1, {"recompute": 1}, (f"{ACTIVATIONS}1 (pp=1), stage 1, block 2 (Block), microbatch 1",)),
    *(
        (mesh, (2, "gradient"), 1, more, (GRADIENTS, "block 2 (Block), microbatch 1"))
        for mesh, more in (("pp=1", {"schedule": "zb-h1"}), ("pp=4", {}), ("pp=2", {"recompute": 1}))
    ),
    ("pp=2", (0, "hook"), 1, IN_TWO, (f"{GRADIENTS}0 (pp=0), stage 0, ", f"block 0 (Block), {OF_OUTPUT}")),
    ("pp=2", None, 3, {"loss": bad_loss}, (f"are in the loss: rank 1 (pp=1){OF_LOSS}3: the loss is inf",)),
    ("pp=2", None, 3, {"loss": weighed}, ("are in the loss: rank ", OF_LOSS, ": the weight that it gives is nan. ")),
    ("pp=2", None, 3, {"loss": lambda o, t: ((o - t).sum() * 0, t.new_zeros(()))}, ("its total weight is 0",)),
    # weights come before all else
    (
        "dp=2,pp=2",
        (0, "output"),
        3,
        {"change": lambda engine: engine.set_weights({"1.layer.bias": NANS}), "before": 1, "zero": 3},
        (OF_WEIGHTS,),
    ),
]


@pytest.mark.parametrize(("mesh", "spoils", "microbatch", "more", "words"), NAMED)
def test_the_first_numbers_that_are_not_finite_are_named(mesh, spoils, microbatch, more, words):
    _, said = stopped(mesh, spoiled_batch(microbatch), spoils, **more)
    assert [one for one in words if one not in said] == []


def test_the_batch_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, words = stopped("pp=1", spoiled_batch(3, math.nan), engine={"spike_dir": tmp_path / "file"})
    assert "Its batch is in no file, as " in words
    _, words = stopped("dp=2,pp=2", spoiled_batch(3, math.nan), engine={"spike_dir": tmp_path / "spikes"})
    paths = [tmp_path / "spikes" / f"not-finite-step-00000002-rank-0000{rank}.safetensors" for rank in (2, 3)]
    assert f"Its batch is in {paths[0]}, {paths[1]}." in words
    inputs, targets = map(load_file, paths)
    assert torch.cat([inputs[f"inputs.{unit}.0"] for unit in range(4)]).isnan().sum() == 1
    assert torch.equal(torch.cat([targets[f"targets.{unit}.0"] for unit in range(4)]), X.chunk(2)[1])


def test_a_job_says_so_and_writes_beside_its_log(data_file: Path, tmp_path: Path) -> None:
    data_file.write_text(
        data_file.read_text()
        .replace("    return Dataset(", "    bad = split(train)\n    bad.inputs[:] = np.nan\n    return Dataset(")
        .replace("train=split(train)", "train=bad")
    )
    config = job(data_file, log={"path": str(tmp_path / "log.jsonl")}, train={"max_skipped": 3})
    plan = plan_of(config)
    said = r"3 steps in a row .*the last is step 3.* microbatch 0, replica 0"
    with pytest.raises(qs.NotFiniteError, match=said) as stop:
        run_local(4, lambda transport: Trainer.of_job(config, plan, transport).fit())
    assert stop.value.exit_code == 1
    assert f"{tmp_path}/not-finite-step-00000003-rank-00000.safetensors" in str(stop.value)


def one_stage(**settings: Any) -> Engine:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=MICROBATCHES)
    return Engine(plan, [Block(0)], F.mse_loss, sgd, max_skipped=2, **settings)


def test_good_steps_between_are_counted_from_the_start() -> None:
    engine, bad = one_stage(), spoiled_batch(0, math.nan)
    for _ in range(4):
        assert engine.step(bad, X).skipped
        assert not engine.step(X, X).skipped
    engine.step(bad, X)
    with pytest.raises(qs.NotFiniteError, match="step 10"):
        engine.step(bad, X)


def test_a_scale_above_one_explains_an_overflow() -> None:
    """Of means scaled by 4, 2 and 1; the last leaves 0.5: the first that counts."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 / X.numel())  # of the sum of so many losses
    engine, bad = one_stage(grad_scaler=scaler), spoiled_batch(0, math.nan)
    assert all(engine.step(bad, X).skipped for _ in range(3))
    with pytest.raises(qs.NotFiniteError, match="step 4"):
        engine.step(bad, X)
