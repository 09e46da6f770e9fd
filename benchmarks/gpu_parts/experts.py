"""Mixtures of experts: how often the host waits for the device in a step, per mixture and microbatch.

On a GPU torch says when an operation makes the host wait (`torch.cuda.set_sync_debug_mode`); on a CPU, where nobody is
waited for, the calls of `tolist`, by which this runtime reads numbers. One wait of a step is for the norm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from paired import Target
from torch import Tensor

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.moe_gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.losses import cross_entropy_sum

from .model import MEDIUM, AdamW, alone, sized, whole

EXPERTS, WARM_UP = 8, 3


def experts(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return the waits of a step, and what it takes."""
    size = sized(MEDIUM, device)
    data = DataSpec(input_shape=(size.length,), num_classes=size.tokens)
    options = MoEGPTOptions(hidden=size.hidden, depth=size.depth, heads=size.heads, experts=EXPERTS)
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=size.microbatches)
    engine = Engine(
        plan, moe_gpt(data, options), cross_entropy_sum, AdamW, dtype=torch.bfloat16, transport=alone(device)
    )
    step = whole(engine.step, size.batch(device), device)
    for _ in range(WARM_UP):
        step()
    waits = count_waits(step, device)
    computations = len(engine.expert_tokens()) * size.microbatches
    each = (waits - 1) / computations
    print(f"\nexperts, {size.title} with {EXPERTS} of them: the host waits {waits} times in a step")
    print(Target(f"waits, each of {computations} mixtures and microbatches", each, 0.0), flush=True)
    return {"waits": waits, "each": each}


def count_waits(step: Callable[[], None], device: torch.device) -> int:
    """Return how often the host waits in a step, that for its end left out."""
    counting = _waits_for_cuda if device.type == "cuda" else _numbers_read
    with counting() as count:
        step()
    return count()


@contextmanager
def _waits_for_cuda() -> Iterator[Callable[[], int]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(warning.message) for warning in heard)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _numbers_read() -> Iterator[Callable[[], int]]:
    calls: list[None] = []

    def noted(tensor: Tensor, read: Callable[[Tensor], Any] = Tensor.tolist) -> Any:
        calls.append(None)
        return read(tensor)

    with patch.object(Tensor, "tolist", noted):
        yield lambda: len(calls)
