"""Training a transformer with experts on a plan, and in one process by a loop that owes nothing to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_outlines import Blocks, build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, gpt_tied, moe_gpt
from quintsched.runtime.parallel.expert.moe import mixtures
from quintsched.runtime.train.summed_losses import cross_entropy_sum

from ...toys import CLASSES, Task, difference, ids_task, sgd, share
from ..lively import livelier

DEPTH, LENGTH, HIDDEN = 2, 8, 16


def moe_blocks(length: int = LENGTH, **options: Any) -> Blocks:
    """A transformer with experts of which some are chosen more often than others."""
    settings = {"hidden": HIDDEN, "depth": DEPTH, "experts": 4, "mlp_ratio": 2, "balance": 0.05, "z": 0.01} | options
    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [livelier(block) for block in moe_gpt(data, MoEGPTOptions(**settings))]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    tokens: dict[str, list[int]]


def train_plainly(task: Task, blocks: Blocks, microbatches: int, clip: float, tied: dict[str, Any]) -> Trained:
    """Train in one process, with auxiliary losses: a loop that owes nothing to the engine."""
    model = build_model(blocks, 0, torch.float64)
    for first, *others in tied.values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    stepper = sgd(list(model.parameters()))
    losses, norms = [], []
    for inputs, targets in zip(task.inputs, task.targets, strict=True):
        weight, total = (targets != -100).sum(), 0.0
        stepper.zero_grad()
        for some, wanted in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            given, loss = some, torch.zeros((), dtype=torch.float64)
            for block in model:
                result = block(given)
                given, auxiliary = result if isinstance(result, tuple) else (result, None)
                loss = loss if auxiliary is None else loss + auxiliary
            loss = loss + cross_entropy_sum(given, wanted)[0]
            loss.backward()
            total += loss.item()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= weight
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepper.step()
        losses.append(total / float(weight))
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return Trained(losses, norms, weights, {name: m.expert_tokens.tolist() for name, m in mixtures(model).items()})


def train_on(
    plan: qs.Plan, task: Task, blocks: Blocks, clip: float, tied: dict[str, Any], **more: Any
) -> list[Trained]:
    def run(transport: Transport) -> Trained:
        engine = Engine(
            plan,
            blocks,
            cross_entropy_sum,
            sgd,
            clip=clip,
            bucket_mb=0.01,
            dtype=torch.float64,
            tied=tied,
            transport=transport,
            **more,
        )
        results = [engine.step(*share(engine, *step)) for step in zip(task.inputs, task.targets, strict=True)]
        norms = [result.grad_norm.item() for result in results if result.grad_norm is not None]
        tokens = {name: row.tolist() for name, row in engine.expert_tokens().items()}
        assert not any(row.any() for row in engine.expert_tokens().values())
        return Trained([result.loss.item() for result in results], norms, engine.full_weights(), tokens)

    return run_local(plan.mesh.size, run, timeout_s=300, rules="nccl")


def require_equality(plan: qs.Plan, more: dict[str, Any] | None = None, *, tied: bool = False, **options: Any) -> None:
    """Train on a plan by NCCL's rules, and in one process; `more` is for the engine."""
    task, blocks = ids_task(2, 8, LENGTH), moe_blocks(tied=tied, **options)
    ties = gpt_tied(MoEGPTOptions(depth=DEPTH, tied=tied))
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, replicas * plan.schedule.microbatches, 1.0, ties)
    found = train_on(plan, task, blocks, 1.0, ties, **(more or {}))
    assert {name for rank in found for name in rank.weights} == set(alone.weights)
    for rank in found:
        assert rank.losses == pytest.approx(alone.losses, abs=1e-12)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-12)
        assert all(difference(weight, alone.weights[name]) <= 1e-12 for name, weight in rank.weights.items())
        assert rank.tokens == alone.tokens
