"""Small models, data and a plain one-process training loop that the engine has to equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.blocks.block_outlines import Blocks, build_model
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.parallel.dropout import Masks, Unit, key_dropouts
from quintsched.runtime.train.summed_losses import correct_sum, cross_entropy_sum

CLASSES = 10


def tiny_vit(depth: int = 4) -> Blocks:
    return vit(DataSpec(input_shape=(1, 8, 8), num_classes=CLASSES), ViTOptions(hidden=16, depth=depth, heads=4))


def tiny_gpt(length: int = 8, *, depth: int = 4, tied: bool = False) -> Blocks:
    return gpt(DataSpec(input_shape=(length,), num_classes=CLASSES), GPTOptions(hidden=16, depth=depth, tied=tied))


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


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


def ids_task(steps: int, samples: int, length: int) -> Task:
    """Batches of token ids, with the next token as target; some targets are padding."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, CLASSES, (steps, samples, length + 1), generator=random)
    targets = ids[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=random) < 0.1] = -100
    return Task(ids[..., :-1].contiguous(), targets)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]


def train_plainly(
    task: Task,
    blocks: Blocks,
    microbatches: int,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    masks: Masks | None = None,
) -> Outcome:
    """Train in one process with nothing of ours but the initial weights: the ground that everything stands on.

    With `masks`, dropouts draw by them.
    """
    model = build_model(blocks, 0, dtype or task.inputs.dtype)
    if masks is not None:
        for number, block in enumerate(model):
            key_dropouts(block, number, masks)
    for first, *others in (tied or {}).values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    stepper = optimizer(list(model.parameters()))
    losses = []
    for step, (inputs, targets) in enumerate(zip(task.inputs, task.targets, strict=True)):
        stepper.zero_grad()
        size = len(inputs) // microbatches
        weight = (targets != -100).sum().to(dtype or task.inputs.dtype)
        total = torch.zeros((), dtype=torch.float64)
        for start, some_inputs, some_targets in zip(
            range(0, len(inputs), size), inputs.split(size), targets.split(size), strict=True
        ):
            with masks.of(Unit(step, range(start, start + size))) if masks else nullcontext():
                logits = model(some_inputs).flatten(0, -2)
            loss = nn.functional.cross_entropy(logits, some_targets.flatten(), ignore_index=-100, reduction="sum")
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= weight
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
        losses.append(float(total / weight))
    return Outcome(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def train_on(
    plan: qs.Plan,
    task: Task,
    blocks: Blocks,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    clip: float | None = None,
    bucket_mb: float = 25.0,
    dtype: torch.dtype | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    rules: Rules = "mailbox",
    **more: Any,
) -> list[Outcome]:
    """Train with the engine on every rank of the plan, in process; returns each rank's losses and own weights.

    `more` is what the engine is told beyond that.
    """

    def run(transport: Transport) -> Outcome:
        return train_rank(transport, plan, task, blocks, optimizer, clip, bucket_mb, dtype, tied, **more)

    return run_local(plan.mesh.size, run, timeout_s=60, rules=rules)


def train_rank(
    transport: Transport,
    plan: qs.Plan,
    task: Task,
    blocks: Blocks,
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
    clip: float | None = None,
    bucket_mb: float = 25.0,
    dtype: torch.dtype | None = None,
    tied: Mapping[str, Sequence[str]] | None = None,
    **more: Any,
) -> Outcome:
    """Train with the engine on one rank of the plan; returns its losses and own weights."""
    engine = Engine(
        plan,
        blocks,
        cross_entropy_sum,
        optimizer,
        metrics={"accuracy": correct_sum},
        clip=clip,
        bucket_mb=bucket_mb,
        dtype=dtype or task.inputs.dtype,
        tied=tied,
        transport=transport,
        **more,
    )
    losses = []
    for inputs, targets in zip(task.inputs, task.targets, strict=True):
        losses.append(engine.step(*share(engine, inputs, targets)).loss.item())
    return Outcome(losses, engine.full_weights())


def share(engine: Engine, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return this replica's share of a batch, and only what the rank needs."""
    return (
        inputs.chunk(engine.num_replicas)[engine.replica] if engine.needs_inputs else None,
        targets.chunk(engine.num_replicas)[engine.replica] if engine.needs_targets else None,
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """max|a-b| / max(1, max|b|), what "equal" is measured by."""
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def worst_difference(outcomes: Sequence[Outcome], expected: Outcome) -> float:
    """The largest difference of any rank's losses or weights; every weight must be held by some rank."""
    assert {name for outcome in outcomes for name in outcome.weights} == set(expected.weights)
    losses = torch.tensor(expected.losses, dtype=torch.float64)
    return max(
        max(difference(torch.tensor(o.losses, dtype=torch.float64), losses) for o in outcomes),
        max(difference(weight, expected.weights[name]) for o in outcomes for name, weight in o.weights.items()),
    )
