"""bf16 with float32 masters: equal to a loop that does the same by hand, on every mesh."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_outlines import build_model
from quintsched.runtime.comm import Transport, run_local

from ..toys import Task, share, tiny_vit

STEPS = 5


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    losses = nn.functional.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
    return losses, float((targets != -100).sum())


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def by_hand(task: Task, microbatches: int) -> dict[str, Tensor]:
    """Train in bf16, adding gradients up and stepping in float32."""
    model = build_model(tiny_vit(), 0, torch.bfloat16)
    low = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in low]
    optimizer = adam(masters)
    for inputs, targets in zip(task.inputs, task.targets, strict=True):
        sums = [torch.zeros_like(master) for master in masters]
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            loss, _ = loss_of(model(x), y)
            for total, gradient in zip(sums, torch.autograd.grad(loss, low), strict=True):
                total += gradient
        for master, total in zip(masters, sums, strict=True):
            master.grad = total / (targets != -100).sum()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(low, masters)
    return dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_bf16_pipelines_are_bit_equal_to_the_loop_by_hand(schedule: str) -> None:
    task = Task.make(STEPS, 8, torch.bfloat16)
    expected = by_hand(task, 4)
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
