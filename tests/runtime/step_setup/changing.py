"""Steps whose shapes change, beside the same steps in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import quintsched as qs
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Rules
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.parallel.mesh_independent_dropout import Masks
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ...helpers import training
from ...helpers.training import Outcome, Step
from ..toys import CLASSES, sgd

LONGEST = 16


def small_gpt() -> Blocks:
    data = DataSpec(input_shape=(LONGEST,), num_classes=CLASSES)
    return gpt(data, GPTOptions(hidden=8, depth=2, heads=2, dropout=0.2))


@dataclass(frozen=True)
class Shape:
    """Batches of each replica in a step: (samples, length), and the number of microbatches."""

    replicas: Sequence[tuple[int, int]]
    microbatches: int | None = None
    evaluates: bool = False


Batch = tuple[Tensor, Tensor]


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


def steps(shapes: Sequence[Shape]) -> list[Step]:
    """Return the steps of these shapes, as the engine is to take them."""
    return [
        Step([(*batch, {"microbatches": shape.microbatches}) for batch in batches(shape, step)], not shape.evaluates)
        for step, shape in enumerate(shapes)
    ]


def train_alone(blocks: Blocks, shapes: Sequence[Shape]) -> Outcome:
    """Train in one process on all replicas' samples, with masks by the numbers of samples in the whole batch."""
    return training.train_alone(blocks, cross_entropy_sum, sgd, steps(shapes), masks=Masks(0), metric=correct_sum)


def train_on(
    plan: qs.Plan, blocks: Blocks, shapes: Sequence[Shape], rules: Rules = "mailbox", **more: Any
) -> list[Outcome]:
    """Train with the engine on every rank of the plan, in process."""
    told: dict[str, Any] = {"metrics": {"accuracy": correct_sum}, "dtype": torch.float64, "wire": rules, **more}
    return training.train_ranks(plan, blocks, cross_entropy_sum, sgd, steps(shapes), **told)
