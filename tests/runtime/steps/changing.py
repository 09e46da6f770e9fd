"""Steps whose shapes change, beside the same steps in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import quintsched as qs
from quintsched.runtime.blocks.block_outlines import Blocks, build_model
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.parallel.dropout import Masks, MaskUnit, key_dropouts
from quintsched.runtime.train.summed_losses import correct_sum, cross_entropy_sum

from ..toys import CLASSES, difference, sgd

LONGEST = 16


def small_gpt(depth: int = 2, dropout: float = 0.2) -> Blocks:
    return gpt(
        DataSpec(input_shape=(LONGEST,), num_classes=CLASSES),
        GPTOptions(hidden=8, depth=depth, heads=2, dropout=dropout),
    )


@dataclass(frozen=True)
class Shape:
    """Batches of each replica in a step: (samples, length), and the number of microbatches."""

    replicas: Sequence[tuple[int, int]]
    microbatches: int | None = None
    evaluates: bool = False


Batch = tuple[Tensor, Tensor]
Figures = tuple[float, float, float]


@dataclass(frozen=True)
class Run:
    """Loss, weight and accuracy of each step, and the weights after all."""

    figures: list[Figures]
    weights: dict[str, Tensor]


def batches(shape: Shape, step: int) -> list[Batch]:
    """Return each replica's batch of a step: ids, and targets of which some are padding."""
    random = torch.Generator().manual_seed(step)
    found = []
    for samples, length in shape.replicas:
        ids = torch.randint(0, CLASSES, (samples, length + 1), generator=random)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=random) < 0.2] = -100
        found.append((ids[:, :-1].contiguous(), targets))
    return found


def train_alone(blocks: Blocks, shapes: Sequence[Shape]) -> Run:
    """Train in one process on all replicas' samples, with masks by the numbers of samples in the whole batch."""
    model, masks = build_model(blocks, 0, torch.float64), Masks(0)
    for number, block in enumerate(model):
        key_dropouts(block, number, masks)
    stepper, figures, trained = sgd(list(model.parameters())), [], 0
    for step, shape in enumerate(shapes):
        stepper.zero_grad()
        model.train(not shape.evaluates)
        total, weight, correct, first = torch.zeros(()), torch.zeros(()), torch.zeros(()), 0
        for inputs, targets in batches(shape, step):
            if not len(inputs):
                continue
            with masks.draw_for(MaskUnit(trained, range(first, first + len(inputs)))):
                output = model(inputs)
            first += len(inputs)
            loss, of_replica = cross_entropy_sum(output, targets)
            total, weight = total + loss, weight + of_replica
            correct = correct + correct_sum(output, targets)
        if not shape.evaluates:
            (total / weight).backward()
            stepper.step()
            trained += 1
        figures.append((total.item() / weight.item(), weight.item(), correct.item() / weight.item()))
    return Run(figures, {name: p.detach().clone() for name, p in model.named_parameters()})


def train_on(
    plan: qs.Plan, blocks: Blocks, shapes: Sequence[Shape], rules: Rules = "mailbox", **more: Any
) -> list[Run]:
    """Train with the engine on every rank of the plan, in process."""
    run = partial(train_rank, plan=plan, blocks=blocks, shapes=shapes, **more)
    return run_local(plan.mesh.size, run, timeout_s=60, rules=rules)


def train_rank(transport: Transport, plan: qs.Plan, blocks: Blocks, shapes: Sequence[Shape], **more: Any) -> Run:
    """Train with the engine on one rank."""
    engine = Engine(
        plan,
        blocks,
        cross_entropy_sum,
        sgd,
        metrics={"accuracy": correct_sum},
        dtype=torch.float64,
        transport=transport,
        **more,
    )
    figures = []
    for step, shape in enumerate(shapes):
        inputs, targets = batches(shape, step)[engine.replica]
        run: Callable[..., Any] = engine.evaluate if shape.evaluates else engine.step
        result = run(
            inputs if engine.needs_inputs else None,
            targets if engine.needs_targets else None,
            microbatches=shape.microbatches,
        )
        figures.append((result.loss.item(), result.weight.item(), result.metrics["accuracy"].item()))
    return Run(figures, engine.full_weights())


def require_equal(found: Sequence[Run], expected: Run, tolerance: float = 1e-12) -> None:
    """Every rank's figures, and the weights that it holds, are those of one process."""
    for run in found:
        for figures, wanted in zip(run.figures, expected.figures, strict=True):
            assert torch.allclose(torch.tensor(figures), torch.tensor(wanted), rtol=tolerance, atol=tolerance), figures
        for name, weight in run.weights.items():
            assert difference(weight, expected.weights[name]) <= tolerance, name
