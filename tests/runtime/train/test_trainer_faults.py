"""Faults that a review found, each with the test that would have shown it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.comm import Transport, connect, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.interpreter.busy_clock import Clock
from quintsched.runtime.optim.gathered_matrix_steps import Stepper
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, read_manifest
from quintsched.runtime.saving.checkpoints.run_folder import RunFolder, saved_steps
from quintsched.runtime.weights_and_gradients.training_state import KeptState

from ...helpers.jobs import data_file, figures, fit, interrupt_after, job
from ..ranks import run_ranks
from ..toys import sgd

__all__ = ["data_file"]

mse = nn.functional.mse_loss


def plan(mesh: str) -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2)


X, Y = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(1, 2, 16).reshape(4, 4)

# ---------------------------------------------------------------- engine


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_steps_changes_nothing(set_to_none: bool) -> None:
    def train(clears: bool) -> Tensor:
        engine = Engine(plan("pp=1"), [lambda: nn.Linear(4, 4)], mse, sgd)
        for _ in range(3):
            engine.step(X, Y)
            if clears:
                engine.optimizer.zero_grad(set_to_none=set_to_none)
        return engine.full_weights()["0.weight"]

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize("as_modules", [False, True])
def test_tokens_into_weights_of_another_type(as_modules: bool) -> None:
    builders = [lambda: nn.Embedding(10, 4), lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4)]

    def run(transport: Transport) -> Tensor:
        blocks = [build() for build in builders] if as_modules else builders
        engine = Engine(plan("pp=2"), blocks, mse, sgd, dtype=torch.float64, transport=transport)
        return engine.step(torch.arange(4), Y.double()).loss

    assert all(torch.isfinite(loss) for loss in run_local(2, run))


def test_block_costs_must_be_those_of_the_blocks() -> None:
    with pytest.raises(qs.UsageError, match="2 block_costs for 4 blocks"):
        Engine(plan("pp=1"), [lambda: nn.Linear(4, 4)] * 4, mse, sgd, block_costs=[1, 1])


def test_a_state_from_before_the_first_step_takes_the_momentum_away() -> None:
    engine = Engine(plan("pp=1"), [lambda: nn.Linear(4, 4)], mse, sgd)
    start = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    first = [engine.step(X, Y).loss.item() for _ in range(3)]
    engine.load_state_dict(start)
    assert [engine.step(X, Y).loss.item() for _ in range(3)] == first


def test_loaded_optimizer_state_lies_beside_its_parameter() -> None:
    weight = nn.Linear(2, 2, bias=False, device="meta").weight
    kept = KeptState(weight, {}, is_shard=True, stepper=Stepper(torch.optim.Adam([weight]), []))
    assert kept.home_of("exp_avg").type == "meta"
    assert kept.home_of("step").type == "cpu"


def test_a_gpu_clock_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """An event of a stream that is done at once; the stretches last 1, 2, 3, … ms."""

        count = 0

        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            self.at_ms = 0.0

        def record(self) -> None:
            Event.count += 1
            self.at_ms = Event.count**2 / 4

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr("torch.Event", Event)
    clock = Clock(torch.device("cuda"))
    for _ in range(100):
        clock.note(clock.now())
        clock.note(clock.now())
        clock.add_up()
    assert not clock._events
    assert clock.read_s() == pytest.approx(sum(((2 * n) ** 2 - (2 * n - 1) ** 2) / 4 for n in range(1, 101)) / 1000)


class Slow(torch.autograd.Function):
    """Takes its time backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


class First(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Slow.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return found


class Last(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0 if x.is_meta or self.training else 0.1)
        return super().forward(x.flatten(1))


def reshape_between(transport: Transport) -> list[float]:
    """Return the loss of an evaluation and a gradient's norm, of stages of which the middle one only reshapes."""
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    plan = qs.compile("gpipe", mesh=f"pp={transport.world_size}", microbatches=8)
    blocks: list[Any] = [lambda: First(4, 4), lambda: nn.Unflatten(1, (2, 2)), lambda: Last(4, 4)]
    engine = Engine(plan, blocks, nn.functional.mse_loss, sgd, block_costs=[1, 1, 1], transport=transport)
    loss, norm = engine.evaluate(x, y).loss, engine.step(x, y).grad_norm
    assert norm is not None
    return [float(loss), float(norm)]


def write_reshaped(folder: Path) -> None:
    transport = connect("gloo", timeout_s=60)
    (folder / f"{transport.rank}.json").write_text(json.dumps(reshape_between(transport)))
    transport.close()


@pytest.mark.processes
def test_a_stage_that_only_reshapes_does_not_send_from_a_receive_buffer(tmp_path: Path) -> None:
    assert run_ranks(write_reshaped, 3, tmp_path) == [0, 0, 0]
    found = json.loads((tmp_path / "0.json").read_text())
    assert found == pytest.approx(run_local(1, reshape_between)[0], rel=1e-5)


# ---------------------------------------------------------------- trainer and checkpoints


def checkpointed(data_file: Path, tmp_path: Path, **sections: Any) -> Any:
    return job(data_file, checkpoint={"dir": str(tmp_path / "c")} | sections.pop("checkpoint", {}), **sections)


def test_resume_where_checkpoints_fall_on_the_end_of_an_epoch_and_few_steps_are_left_to_trace(
    data_file: Path, tmp_path: Path
) -> None:
    runtime = {"trace": str(tmp_path / "trace"), "trace_first": 2, "trace_steps": 8}
    interrupt_after(checkpointed(data_file, tmp_path, checkpoint={"every": 6}), steps=13)
    config = checkpointed(data_file, tmp_path, checkpoint={"every": 6}, runtime=runtime)
    assert figures(fit(config, resume=True)[0][0]) == figures(fit(job(data_file))[0][0])
    assert len(list((tmp_path / "trace").glob("rank*.json"))) == 4


def test_the_only_checkpoint_is_never_taken_away(
    data_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[list[int]] = []
    drop = RunFolder._drop

    def noted(self: RunFolder, folder: Path) -> None:
        there.append([saved.step for saved in saved_steps(self.directory)])
        drop(self, folder)

    monkeypatch.setattr(RunFolder, "_drop", noted)
    fit(checkpointed(data_file, tmp_path, train={"epochs": 2}, checkpoint={"every": 3, "keep": 1}))
    assert there == [[6, 3], [9, 6], [12, 9]]


def test_resume_after_a_loss_that_was_not_finite(data_file: Path, tmp_path: Path) -> None:
    train = {"optimizer": {"name": "sgd", "lr": 1e30}, "clip": None, "epochs": 2, "max_skipped": 0}
    config = checkpointed(data_file, tmp_path, train=train, checkpoint={"every": 4})
    interrupt_after(config, steps=5)
    history, _, _ = fit(config, resume=True)[0]
    assert [record["step"] for record in history] == [6, 12]
    assert math.isnan(history[-1]["loss"])


def test_a_first_validation_loss_that_is_not_finite_is_no_best(data_file: Path) -> None:
    config = job(data_file, train={"epochs": 4, "patience": 3, "optimizer": {"lr": 0.0}})

    def run(transport: Transport) -> float | None:
        from quintsched.runtime.launch.job_plan import plan_of
        from quintsched.runtime.train.trainer import Trainer

        trainer = Trainer.of_job(config, plan_of(config), transport)
        for loss in (math.nan, 3.0, 2.0):
            trainer._loop.watch_for_gain(loss, "epochs", "1")
        assert not trainer.progress.stopped
        return trainer.progress.best

    assert run_local(4, run) == [2.0] * 4


def test_the_bubble_leaves_validation_out(data_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    fit(
        job(
            data_file,
            data={"options": {"validation": 1000}},
            parallel={"mesh": "dp=1", "microbatches": 1},
            log={"path": str(path), "every": 4},
        )
    )
    told = [record["bubble"] for record in map(json.loads, path.read_text().splitlines()) if record["event"] == "step"]
    assert len(told) == 4
    assert all(0 <= bubble <= 1 for bubble in told)


def test_a_folder_that_only_looks_like_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in ("step-00000006", "step-00000007-best", "step-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    assert [saved.step for saved in saved_steps(tmp_path)] == [6]


def test_progress_that_cannot_be_understood_is_refused(data_file: Path, tmp_path: Path) -> None:
    config = checkpointed(data_file, tmp_path, train={"epochs": 1})
    fit(config)
    path = tmp_path / "c" / "step-00000006" / MANIFEST
    manifest = read_manifest(path, 6)
    for change, place in (({"epoch": "one"}, "/epoch"), ({"epoc": 1}, "/epoc: ")):
        path.write_bytes(manifest.model_copy(update={"progress": manifest.progress | change}).to_json())
        with pytest.raises(qs.InputError, match=f"the checkpoint's progress: {place}"):
            fit(config, resume=True)


def test_weights_that_cannot_be_written_are_refused_before_the_first_step(data_file: Path) -> None:
    config = job(data_file, parallel={"mesh": "dp=1"}, checkpoint={"export": "/proc/self/weights"})
    with pytest.raises(qs.UsageError, match="/proc/self: cannot write the weights: No such file"):
        interrupt_after(config, steps=0)
