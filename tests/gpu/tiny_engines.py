"""Engines of a tiny GPT, their steps, and the bits that they end with."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import quintsched as qs
from quintsched.runtime import Engine, Transport
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from tests.runtime.toys import ids_task, sgd, share, tiny_gpt

STEPS, SAMPLES, LENGTH = 5, 8, 16
Trained = tuple[list[float], dict[str, Tensor]]
"""Losses, and the float32 masters of a rank by name."""


def engine_of(transport: Transport, plan: qs.Plan, dtype: torch.dtype, blocks: Any = None, **settings: Any) -> Engine:
    return Engine(
        plan, blocks or tiny_gpt(LENGTH), cross_entropy_sum, sgd, dtype=dtype, transport=transport, **settings
    )


def train(engine: Engine) -> Trained:
    """Do a few steps, by plain products: faster kernels of attention add up in an order that changes."""
    with sdpa_kernel(SDPBackend.MATH):
        batches = ids_task(STEPS, SAMPLES, LENGTH).batches
        losses = [engine.step(*share(engine, *batch)).loss.item() for batch in batches]
    named = [pair for stage in engine.stages.values() for pair in stage.named_weights().items()]
    return losses, {name: engine.masters.master_of(weight).detach() for name, weight in named}


def require_same_bits(found: Trained, expected: Trained) -> None:
    """Require the losses, and the masters that there are, of another training."""
    assert found[0] == expected[0]
    for name, weight in found[1].items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[1][name]), name
