"""Faults that a review found, each with the test that would have shown it."""

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, read_manifest

from ...helpers.jobs import data_file, fit, interrupt_after, job
from ..toys import sgd

__all__ = ["data_file"]

mse = nn.functional.mse_loss


def plan(mesh: str) -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2)


# ---------------------------------------------------------------- engine


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


def test_resume_after_a_loss_that_was_not_finite(data_file: Path, tmp_path: Path) -> None:
    train = {"optimizer": {"name": "sgd", "lr": 1e30}, "clip": None, "epochs": 2, "max_skipped": 0}
    config = checkpointed(data_file, tmp_path, train=train, checkpoint={"every": 4})
    interrupt_after(config, steps=5)
    history, _, _ = fit(config, resume=True)[0]
    assert [record["step"] for record in history] == [6, 12]
    assert math.isnan(history[-1]["loss"])


def test_progress_that_cannot_be_understood_is_refused(data_file: Path, tmp_path: Path) -> None:
    config = checkpointed(data_file, tmp_path, train={"epochs": 1})
    fit(config)
    path = tmp_path / "c" / "step-00000006" / MANIFEST
    manifest = read_manifest(path, 6)
    for change, place in (({"epoch": "one"}, "/epoch"), ({"epoc": 1}, "/epoc: ")):
        path.write_bytes(manifest.model_copy(update={"progress": manifest.progress | change}).to_json())
        with pytest.raises(qs.InputError, match=f"the checkpoint's progress: {place}"):
            fit(config, resume=True)


def test_block_costs_must_be_those_of_the_blocks() -> None:
    with pytest.raises(qs.UsageError, match="2 block_costs for 4 blocks"):
        Engine(plan("pp=1"), [lambda: nn.Linear(4, 4)] * 4, mse, sgd, block_costs=[1, 1])


def test_weights_that_cannot_be_written_are_refused_before_the_first_step(data_file: Path) -> None:
    config = job(data_file, parallel={"mesh": "dp=1"}, checkpoint={"export": "/proc/self/weights"})
    with pytest.raises(qs.UsageError, match="/proc/self: cannot write the weights: No such file"):
        interrupt_after(config, steps=0)
