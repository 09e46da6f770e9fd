"""bf16 with float32 masters: bitwise equal to one process that does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local

from ...helpers.training import train_alone
from ..toys import Task, adam, share, tiny_vit

STEPS = 5


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    losses = nn.functional.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
    return losses, float((targets != -100).sum())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_bf16_pipelines_are_bit_equal_to_one_process(schedule: str) -> None:
    task = Task.make(STEPS, 8, torch.bfloat16)
    how: dict[str, Any] = {"microbatches": 4, "dtype": torch.bfloat16, "low": True}
    expected = train_alone(tiny_vit(), loss_of, adam, task.batches, **how).weights
    plan = qs.compile(schedule, mesh="pp=2", microbatches=4)

    def run(transport: Transport) -> tuple[dict[str, Tensor], set[torch.dtype]]:
        engine = Engine(plan, tiny_vit(), loss_of, adam, dtype=torch.bfloat16, transport=transport)
        for inputs, targets in zip(task.inputs, task.targets, strict=True):
            engine.step(*share(engine, inputs, targets))
        model = {n.removeprefix("model."): t for n, t in engine.state_dict().items() if n.startswith("model.")}
        return model, {p.dtype for stage in engine.stages.values() for p in stage.parameters()}

    found: dict[str, Tensor] = {}
    for weights, types in run_local(2, run):
        found |= weights
        assert types == {torch.bfloat16}
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], master) for name, master in expected.items())


def test_a_checkpoint_holds_the_masters() -> None:
    task = Task.make(4, 8, torch.bfloat16)
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)

    def make() -> Engine:
        return Engine(plan, tiny_vit(), loss_of, adam, dtype=torch.bfloat16)

    first, second = make(), make()
    for step in range(2):
        first.step(task.inputs[step], task.targets[step])
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert {tensor.dtype for name, tensor in state.items() if name.startswith("model.")} == {torch.float32}
    second.load_state_dict(state)
    for step in (2, 3):
        one, other = (engine.step(task.inputs[step], task.targets[step]) for engine in (first, second))
        assert one.loss == other.loss
    assert all(torch.equal(t, first.state_dict()[name]) for name, t in second.state_dict().items())
