"""Mixtures of experts: number of device synchronizations per mixture and microbatch, and the cost of padding.

    counted          nothing is dropped; the host reads the number of rows of each expert
    padded to F      each expert gets F times an even load, F = experts / top_k: as many rows as there are tokens

On a GPU torch warns of operations that synchronize (`torch.cuda.set_sync_debug_mode`); on a CPU, which never
waits, calls of `tolist` are counted, by which this runtime reads numbers. One wait of a step is for the norm.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from paired import Target, report, sample
from torch import Tensor

from quintsched.runtime import Engine
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from .model import AdamW, Size, alone, synchronize, whole

EXPERTS, TOP_K, WARM_UP = 8, 2, 3
COUNTED, FACTORS = "counted", (1.0, 1.25, EXPERTS / TOP_K)

LARGE = Size("GPT with experts", 1024, 4, 16, 4096, 1024, samples=2, microbatches=8, steps=1)
SMALL = Size("small GPT with experts", 256, 2, 4, 256, 256, samples=2, microbatches=2, steps=1)
"""Size that a CPU computes in a second; in float32, which is no slower there."""


def experts(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return the synchronizations of a step, and its time, with and without padding."""
    size = LARGE if device.type == "cuda" else SMALL
    batch = size.batch(device)
    engines = {COUNTED: make(size, device)}
    engines |= {f"padded to {factor:g}": make(size, device, capacity_factor=factor) for factor in FACTORS}
    rivals = {name: whole(engine.step, batch, device) for name, engine in engines.items()}
    for step in rivals.values():
        for _ in range(WARM_UP):
            step()
    computations = len(engines[COUNTED].expert_tokens()) * size.microbatches
    each = {name: (count_waits(step, device) - 1) / computations for name, step in rivals.items()}
    gc.collect()
    samples = sample(rivals, rounds, size.steps, partial(synchronize, device))
    targets = [
        Target(f"waits of {name!r}, each of {computations} mixtures and microbatches", each[name], 0.0)
        for name in each
        if name != COUNTED
    ]
    found = report(f"{size.title}, {EXPERTS} of them", samples, size.steps, COUNTED, targets)
    print(f"  waits of {COUNTED!r}: {each[COUNTED]:.3f}, one is for how many rows go where", flush=True)
    return found | {"waits": each}


def make(size: Size, device: torch.device, **padding: float) -> Engine:
    """Return an engine on one rank; `padding` is the capacity factor of mixtures that pad."""
    data = DataSpec(input_shape=(size.length,), num_classes=size.tokens)
    shape = {"hidden": size.hidden, "depth": size.depth, "heads": size.heads, "experts": EXPERTS, "top_k": TOP_K}
    blocks = moe_gpt(data, MoEGPTOptions(**shape, **padding, pad_to_capacity=bool(padding)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Engine(size.plan("1f1b"), blocks, cross_entropy_sum, AdamW, dtype=dtype, transport=alone(device))


def count_waits(step: Callable[[], None], device: torch.device) -> int:
    """Return the number of synchronizations in a step, without the final one."""
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
