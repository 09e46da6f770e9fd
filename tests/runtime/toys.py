"""Small models and data, and how they are trained: in one process, and by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Rules
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ..helpers.training import Outcome, difference, run_engines, train_alone, train_ranks, worst_difference

CLASSES = 10

__all__ = ["Outcome", "difference", "worst_difference"]


def tiny_vit(depth: int = 4) -> Blocks:
    return vit(DataSpec(input_shape=(1, 8, 8), num_classes=CLASSES), ViTOptions(hidden=16, depth=depth, heads=4))


def tiny_gpt(length: int = 8, *, depth: int = 4, tied: bool = False) -> Blocks:
    return gpt(DataSpec(input_shape=(length,), num_classes=CLASSES), GPTOptions(hidden=16, depth=depth, tied=tied))


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adam = partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True)
class Task:
    """Batches (steps, samples, …), some of whose samples are padding, unevenly spread."""

    inputs: Tensor
    targets: Tensor

    @classmethod
    def make(cls, steps: int, samples: int, dtype: torch.dtype) -> Task:
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(steps, samples, 1, 8, 8, generator=random, dtype=torch.float64).to(dtype)
        targets = torch.randint(0, CLASSES, (steps, samples), generator=random)
        targets[torch.rand(steps, samples, generator=random) < 0.2] = -100
        targets[:, 0] = 1
        return cls(inputs, targets)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs, self.targets, strict=True))


def ids_task(steps: int, samples: int, length: int) -> Task:
    """Batches of token ids, with the next token as target; some targets are padding."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CLASSES, (steps, samples, length + 1), generator=random)
    targets = ids[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=random) < 0.1] = -100
    return Task(ids[..., :-1].contiguous(), targets)


def train_plainly(
    task: Task,
    blocks: Blocks,
    microbatches: int,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> Outcome:
    """Train in one process with nothing of ours but the initial weights: the ground that everything stands on."""
    settings: dict[str, Any] = {"microbatches": microbatches, "dtype": dtype or task.inputs.dtype, "clip": clip, **more}
    return train_alone(blocks, cross_entropy_plainly, optimizer, task.batches, **settings)


def cross_entropy_plainly(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the targets that count, and their number."""
    total = nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def train_on(
    plan: qs.Plan,
    task: Task,
    blocks: Blocks,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    clip: float | None = None,
    bucket_mb: float = 25.0,
    dtype: torch.dtype | None = None,
    rules: Rules = "mailbox",
    **more: Any,
) -> list[Outcome]:
    """Train with the engine on every rank of the plan, in process; `more` are settings of the engine."""
    settings: dict[str, Any] = {"clip": clip, "bucket_mb": bucket_mb, "dtype": dtype or task.inputs.dtype, **more}
    metrics = {"accuracy": correct_sum}
    return train_ranks(
        plan, blocks, cross_entropy_sum, optimizer, task.batches, wire=rules, metrics=metrics, **settings
    )


def share(engine: Engine, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return this replica's share of a batch, and only what the rank needs."""
    return (
        inputs.chunk(engine.num_replicas)[engine.replica] if engine.needs_inputs else None,
        targets.chunk(engine.num_replicas)[engine.replica] if engine.needs_targets else None,
    )


def peaks_of_saved(plan: qs.Plan, task: Task, blocks: Blocks) -> tuple[list[int], tuple[float, ...]]:
    """Return each rank's measured peak of saved bytes in a second step, and the simulated one from what units hold."""

    def run(engine: Engine) -> tuple[int, tuple[float, ...]]:
        engine.step(task.inputs[0], task.targets[0])
        _, counted = engine.step_counting_saved(task.inputs[1], task.targets[1])
        return counted.peak, plan.simulate(engine.saved_costs(counted)).peak_activations

    found = run_engines(plan, lambda: blocks, run, cross_entropy_sum, sgd, dtype=torch.float32)
    return [peak for peak, _ in found], found[0][1]
