"""Engines, results and split models at a prompt: one line each."""

from __future__ import annotations

import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local, split


def test_one_line_each() -> None:
    plan = qs.compile("1f1b", mesh="dp=1,pp=2", microbatches=2)
    inputs = torch.ones(4, 3)

    def rank(transport: Transport) -> list[str]:
        blocks = [lambda: nn.Linear(3, 3)] * 3
        metrics = {"largest": lambda output, targets: ((output > 9).sum(), output.numel())}
        engine = Engine(plan, blocks, nn.MSELoss(), torch.optim.SGD, metrics=metrics, transport=transport)
        return [repr(engine), *map(repr, (engine.step(inputs, inputs), engine.evaluate(inputs, inputs)))]

    (first, step, evaluation), (last, *same) = run_local(2, rank)
    assert first == "Engine(1f1b on dp=1,pp=2, 2 microbatches; rank 0 of 2 (dp=0, pp=0): stage 0 of 2 blocks)"
    assert last.endswith("; rank 1 of 2 (dp=0, pp=1): stage 1 of 1 block)")
    assert step.startswith("StepResult(loss=")
    assert ", weight=12, grad_norm=" in step
    assert ", largest=" in step
    assert "grad_norm" not in evaluation
    assert same == [step, evaluation]


def test_blocks_of_a_split_model_by_their_classes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert repr(split(model)) == "Split(4 blocks: Linear, ReLU, 2 x Linear)"
