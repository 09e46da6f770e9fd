"""Buffers of messages in a run: made once, as many as the plan says, and at the fullest moment all are in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.interpreter import p2p
from quintsched.runtime.interpreter.rank_state import RankState
from quintsched.schedules import all_schedules

from ..toys import sgd

WIDTH, SAMPLES = 4, 2
TRAINING = [found for found in all_schedules() if found.mode == "train"]
CHUNKED = [found.name for found in TRAINING if found.name in ("bfs", "interleaved-1f1b", "interleaved-zb")]


class Layer(nn.Module):
    """A linear layer: its backward wants its input and the gradient of its output, at once or later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: object = None) -> Tensor:
        found: Tensor = self.inner(x)
        return found


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).square().sum()


class Used(NamedTuple):
    """What a rank made, and the most of it that was in use at once."""

    made: int
    receives: int
    receive_bytes: int
    sends: int


class Watch:
    """After every call, counts the buffers that somebody looks into or waits for, and the sends in flight."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._buffers = state.messages.buffers.all()
        self._idle = [self._views(buffer) for buffer in self._buffers]
        self.receives = self.receive_bytes = self.sends = 0

    @staticmethod
    def _views(buffer: Tensor) -> int:
        found: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
        return found

    def _used(self) -> list[Tensor]:
        cells = self._state.cells._cells.values()
        waiting = {id(tensor) for cell in cells for tensor in cell.value}
        return [
            buffer
            for buffer, idle in zip(self._buffers, self._idle, strict=True)
            if id(buffer) in waiting or self._views(buffer) > idle
        ]

    def wrap(self, index: int, call: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            call()
            used = self._used()
            self.receives = max(self.receives, len(used))
            self.receive_bytes = max(self.receive_bytes, sum(buffer.nbytes for buffer in used))
            self.sends = max(self.sends, sum(cell.sent is not None for cell in self._state.cells.sending))

        return watched


def run(plan: qs.Plan, rules: Rules, steps: int = 2) -> list[Used]:
    """Train on a plan, and return what each pipeline rank used in the last step."""
    units, length = plan.schedule.microbatches, 2 * plan.schedule.slices
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, units * SAMPLES, length, WIDTH, generator=random)

    def on_rank(transport: Transport) -> Used:
        engine = Engine(plan, [Layer] * len(plan.stage_to_pp), squares, sgd, transport=transport)
        for _ in range(steps - 1):
            engine.step(inputs, targets)
        interpreter = engine._runner.interpreters["train"]
        watch = Watch(interpreter.state)
        interpreter.run(engine._model.batches(plan, inputs, targets, {}), steps, interpreter.watched(watch))
        return Used(len(interpreter.state.messages.buffers.all()), watch.receives, watch.receive_bytes, watch.sends)

    return run_local(plan.mesh.size, on_rank, rules=rules)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are taken for large ones, of which two are in flight."""
    monkeypatch.setattr(p2p, "AHEAD_BYTES", 0)


def compiled(name: str, recompute: int = 0) -> qs.Plan:
    schedule = next(found for found in TRAINING if found.name == name)
    slices = 2 if schedule.max_slices > 1 else 1
    chunks = 2 if name in CHUNKED else None
    return qs.compile(name, mesh="pp=4", microbatches=8, chunks=chunks, slices=slices, recompute=recompute)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("name", [found.name for found in TRAINING])
def test_a_run_uses_as_many_buffers_as_its_plan_says(name: str, recompute: int, rules: Rules) -> None:
    plan = compiled(name, recompute)
    profile = "channel" if rules == "nccl" else "tagged"
    slots = plan.check(profile=profile).slots
    length = 2 * SAMPLES * WIDTH * torch.float32.itemsize
    found = run(plan, rules)
    assert tuple(used.made for used in found) == slots.receive
    assert tuple(used.receives for used in found) == slots.receive
    assert tuple(used.receive_bytes for used in found) == tuple(number * length for number in slots.receive)
    assert tuple(used.sends for used in found) == slots.send
