"""Training a transformer, with experts or without, on a plan by NCCL's rules and in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, gpt_tied, moe_gpt
from quintsched.runtime.parallel.expert.moe import mixtures
from quintsched.runtime.parallel.mesh_independent_dropout import Masks
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ....helpers.training import Outcome, call_with_share, copied, difference, train_alone
from ...toys import CLASSES, Task, cross_entropy_plainly, ids_task, sgd
from ..lively import livelier

DEPTH, LENGTH, HIDDEN = 2, 8, 16


def moe_blocks(length: int = LENGTH, **options: Any) -> Blocks:
    """A transformer with experts of which some are chosen more often than others."""
    settings = {"hidden": HIDDEN, "depth": DEPTH, "experts": 4, "mlp_ratio": 2, "balance": 0.05, "z": 0.01} | options
    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [livelier(block) for block in moe_gpt(data, MoEGPTOptions(**settings))]


@dataclass(frozen=True)
class Trained(Outcome):
    """An outcome with the rows that each expert was given."""

    tokens: dict[str, list[int]] = field(default_factory=dict)


def train_plainly(task: Task, blocks: Blocks, microbatches: int, tied: Mapping[str, Any]) -> Trained:
    """Train in one process, with auxiliary losses and the masks of dropouts."""
    tokens: dict[str, list[int]] = {}

    def count(model: Any, step: int) -> None:
        tokens.update({name: layer.expert_tokens.tolist() for name, layer in mixtures(model).items()})

    settings: dict[str, Any] = {"microbatches": microbatches, "clip": 1.0, "tied": tied, "masks": Masks(0)}
    alone = train_alone(blocks, cross_entropy_plainly, sgd, task.batches, after=count, **settings)
    return Trained(**vars(alone), tokens=tokens)


def train_on(plan: qs.Plan, task: Task, blocks: Blocks, tied: Mapping[str, Any], **more: Any) -> list[Trained]:
    settings = {"clip": 1.0, "bucket_mb": 0.01, "dtype": torch.float64, "tied": tied, **more}

    def run(transport: Transport) -> Trained:
        engine = Engine(plan, copied(blocks), cross_entropy_sum, sgd, transport=transport, **settings)
        results = [call_with_share(engine, engine.step, batch) for batch in task.batches]
        norms = [result.grad_norm.item() for result in results if result.grad_norm is not None]
        tokens = {name: row.tolist() for name, row in engine.expert_tokens().items()}
        assert not any(row.any() for row in engine.expert_tokens().values())
        return Trained([result.loss.item() for result in results], engine.full_weights(), norms, tokens=tokens)

    return run_local(plan.mesh.size, run, timeout_s=300, rules="nccl")


def require_same(found: Sequence[Trained], expected: Sequence[Trained]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert all(difference(weight, other.weights[name]) <= 1e-12 for name, weight in one.weights.items())
        assert one.losses == pytest.approx(other.losses, abs=1e-12)
        assert one.norms == pytest.approx(other.norms, rel=1e-12)
        assert one.tokens == other.tokens


def require_equality(
    plan: qs.Plan, more: Mapping[str, Any] | None = None, *, tied: bool = False, **options: Any
) -> None:
    """Train on a plan, and in one process; `more` is for the engine, `options` the model's, or blocks."""
    ties = options.pop("ties", None) or gpt_tied(MoEGPTOptions(depth=DEPTH, tied=tied))
    task = options.pop("task", None) or ids_task(2, 8, LENGTH)
    blocks = options.pop("blocks", None) or moe_blocks(tied=tied, **options)
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train_plainly(task, blocks, replicas * plan.schedule.microbatches, ties)
    ranks = train_on(plan, task, blocks, ties, **(more or {}))
    assert {name for rank in ranks for name in rank.weights} == alone.weights.keys()
    require_same(ranks, [alone] * len(ranks))
