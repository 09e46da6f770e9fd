"""Parameters that no microbatch uses are not stepped, as in one process; zeros that came are a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.blocks import build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.state import grad_buckets

from ..toys import difference, share

WIDTH = 8


class Choosing(nn.Module):
    """Has three branches: one per sign of the first sample's first feature, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, choose: Tensor) -> Tensor:
        if x.is_meta:
            return self.positive(x)
        branch = self.positive if choose[0] > 0 else self.negative
        return x + torch.tanh(branch(x)) + self.gate * 0 + (self.last * 0.0 if choose[0] < 0 else 0)


def blocks(count: int = 2) -> list[Callable[[], nn.Module]]:
    return [Choosing] * count


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return (output - targets).square().sum(), float(len(output))


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = []
    for signs in ([1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, 1, -1], [1, 1, 1, 1]):
        inputs, targets = torch.randn(2, 8, WIDTH, generator=random, dtype=torch.float64).unbind()
        found.append((inputs, targets, torch.tensor(signs, dtype=torch.float64).repeat_interleave(2)))
    return found


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01, weight_decay=0.3, eps=(1e-6, 1e-3)),
}


def alone(optimizer: str) -> dict[str, Tensor]:
    """Train in one process, gradients set to none between steps."""
    model = build_model(blocks(), 0, torch.float64)
    stepper = OPTIMIZERS[optimizer](list(model.parameters()))
    for inputs, targets, choose in batches():
        stepper.zero_grad(set_to_none=True)
        for x, y, c in zip(inputs.split(2), targets.split(2), choose.split(2), strict=True):
            for block in model:
                x = block(x, c)
            (loss(x, y)[0] / 8).backward()
        stepper.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("mesh", "zero"), [("dp=2,pp=2", 0), ("dp=2,pp=2", 1), ("dp=2,pp=2", 3), ("dp=2", 2), ("dp=4", 1), ("pp=2", 0)]
)
def test_what_nobody_used_is_not_stepped(optimizer: str, mesh: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = qs.Mesh.parse(mesh).size
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4 // qs.Mesh.parse(mesh).axis_size("dp"), zero=zero)
    expected = alone(optimizer)
    trained = train(plan, OPTIMIZERS[optimizer], ranks)
    for weights in trained:
        for name, weight in weights.items():
            assert difference(weight, expected[name]) <= 1e-12, name
    monkeypatch.setattr(grad_buckets, "IN_CACHE", 0)  # the first gradient of a step is copied
    require_same_bits(trained, train(plan, OPTIMIZERS[optimizer], ranks))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_gradients_have_the_same_bits_whether_a_step_begins_at_zero_or_with_a_copy(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = qs.compile(schedule, mesh="dp=2,pp=2", microbatches=2, chunks=2 if schedule[0] == "i" else 1)
    trained = [train(plan, OPTIMIZERS["adamw"], 4, parts=parts) for parts in (1, 2)]
    monkeypatch.setattr(grad_buckets, "IN_CACHE", 0)
    for parts, weights in zip((1, 2), trained, strict=True):
        require_same_bits(weights, train(plan, OPTIMIZERS["adamw"], 4, parts=parts))


def train(plan: qs.Plan, optimizer: Any, ranks: int, *, parts: int = 1) -> list[dict[str, Tensor]]:
    """Return all ranks' weights; gradients are accumulated over some parts of every batch."""

    def run(transport: Transport) -> dict[str, Tensor]:
        engine = Engine(
            plan,
            blocks(max(2, len(plan.stage_to_pp))),
            loss,
            optimizer,
            dtype=torch.float64,
            transport=transport,
            bucket_mb=0.0005,
        )
        for inputs, targets, choose in batches():
            mine = choose.chunk(engine.num_replicas)[engine.replica]
            x, y = share(engine, inputs, targets)
            for part in range(parts):
                given = [None if t is None else t.chunk(parts)[part] for t in (x, y)]
                engine.step(*given, choose=mine.chunk(parts)[part], last=part == parts - 1)
        return engine.full_weights()

    return run_local(ranks, run, timeout_s=60)


def require_same_bits(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> None:
    for mine, other in zip(some, others, strict=True):
        assert all(torch.equal(weight, other[name]) for name, weight in mine.items())
