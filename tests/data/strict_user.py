"""A user's program that mypy checks strictly against the installed wheel; an ignore that hides no error is one, too."""

from collections.abc import Iterable
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quintsched as qs
from quintsched.runtime import Engine, StopRequest, Trainer, run_local, split

mesh = qs.Mesh(dp=2, pp=2)
plan = qs.compile("1f1b", mesh=mesh, microbatches=8)
assert_type(plan, qs.Plan)
assert_type(plan.simulate().bubble, float)
assert_type(plan.check().sound, bool)
qs.compile("1f1b", mesh=mesh, microbatches="8")  # type: ignore[arg-type]


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of some parameters."""
    return torch.optim.AdamW(parameters, lr=3e-4)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a mean over samples."""
    return nn.functional.cross_entropy(outputs, targets)


def train(batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Train by a loop of one's own."""
    engine = Engine(plan, [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)], loss_of, adam)
    stop, losses = StopRequest(), []
    with stop.listening():
        for inputs, targets in batches:
            result = engine.step(inputs, targets)
            losses.append(float(result.loss))
    return losses


model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
data = TensorDataset(torch.zeros(8, 8), torch.zeros(8))
trainer = Trainer(split(model), data, None, {"parallel": {"mesh": "pp=2"}}, optimizer=adam)
assert_type(trainer.total_steps, int)
run_local(4, lambda transport: transport.rank)
