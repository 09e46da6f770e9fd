"""Faults that a review found, each with the test that would have shown it."""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.interpreter.busy_clock import Clock
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, read_manifest
from quintsched.runtime.saving.checkpoints.run_folder import saved_steps
from quintsched.runtime.train.trainer import Trainer

from ...helpers.jobs import data_file, figures, fit, interrupt_after, job
from ..toys import sgd

__all__ = ["data_file"]

mse = nn.functional.mse_loss


def plan(mesh: str) -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2)


X, Y = torch.linspace(-1, 1, 16).reshape(4, 4), torch.linspace(1, 2, 16).reshape(4, 4)

# ---------------------------------------------------------------- engine


def test_zero_grad_between_steps_changes_nothing() -> None:
    def train(**clears: bool) -> Tensor:
        engine = Engine(plan("pp=1"), [lambda: nn.Linear(4, 4)], mse, sgd)
        for _ in range(3):
            engine.step(X, Y)
            if clears:
                engine.optimizer.zero_grad(**clears)
        return engine.full_weights()["0.weight"]

    assert torch.equal(train(set_to_none=True), train())
    assert torch.equal(train(set_to_none=False), train())


def test_tokens_into_weights_of_another_type() -> None:
    def run(transport: Transport) -> Tensor:
        blocks = [lambda: nn.Embedding(10, 4), nn.LayerNorm(4), lambda: nn.Linear(4, 4)]
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


def test_a_stage_that_only_reshapes_does_not_send_from_a_receive_buffer() -> None:
    """The last stage is slow, so that the middle one has received again before its message is taken."""

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0 if x.is_meta else 0.02)
            return super().forward(x.flatten(1))

    x, y, made = torch.randn(16, 4), torch.randn(16, 4), [nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), Last(4, 4)]

    def run(transport: Transport) -> list[float]:
        plan = qs.compile("gpipe", mesh=f"pp={transport.world_size}", microbatches=8)
        engine = Engine(plan, copy.deepcopy(made), mse, sgd, block_costs=[1, 1, 1], transport=transport)
        return [float(engine.evaluate(x, y).loss), float(engine.step(x, y).grad_norm or 0.0)]

    assert run_local(3, run, rules="rendezvous")[0] == pytest.approx(run_local(1, run)[0], rel=1e-5)


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


def test_resume_after_a_loss_that_was_not_finite(data_file: Path, tmp_path: Path) -> None:
    train = {"optimizer": {"name": "sgd", "lr": 1e30}, "clip": None, "epochs": 2, "max_skipped": 0}
    config = checkpointed(data_file, tmp_path, train=train, checkpoint={"every": 4})
    interrupt_after(config, steps=5)
    history, _, _ = fit(config, resume=True)[0]
    assert [record["step"] for record in history] == [6, 12]
    assert math.isnan(history[-1]["loss"])


def test_a_first_validation_loss_that_is_not_finite_is_no_best(data_file: Path) -> None:
    config = job(data_file, parallel={"mesh": "dp=1"}, train={"epochs": 4, "patience": 3})
    (trainer,) = run_local(1, lambda transport: Trainer.of_job(config, plan_of(config), transport))
    for loss in (math.nan, 3.0, 2.0):
        trainer._loop.watch_for_gain(loss, "epochs", "1")
    assert (trainer.progress.stopped, trainer.progress.best) == (False, 2.0)


def test_the_bubble_leaves_validation_out(data_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    many, alone = {"options": {"validation": 1000}}, {"mesh": "dp=1", "microbatches": 1}
    fit(job(data_file, data=many, parallel=alone, log={"path": str(path), "every": 4}))
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
