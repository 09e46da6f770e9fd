"""Predictions on one rank from measurements by `calibrate` here, beside measured steps.

calibrate ──▶ description of this GPU ──▶ predicted seconds of a few strategies ─┬▶ ratio of each, and their order
                                          measured seconds of the same ──────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from paired import Target, median_s, sample_warm

from quintsched.runtime import Engine
from quintsched.runtime.calibrate.machine import calibrate
from quintsched.runtime.train.losses import cross_entropy_sum
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.library import find_hardware
from quintsched.strategies.descriptions.placement import resolved
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.wording import strategy_name
from quintsched.strategies.prediction.plans import plan_of
from quintsched.strategies.prediction.step import predict

from .model import MEDIUM, AdamW, Size, alone, sized, synchronize, whole

WARM_UP, MOST_APART = 3, 0.05
STAND_IN = "a100-80gb"
"""Hardware assumed for a CPU, to try the script itself."""
CHOICES = ((1, "none"), (4, "none"), (1, "full"))
"""Samples of a microbatch, and recomputation: as different as possible on one rank."""


def predicted(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return predicted and measured seconds of a step."""
    size = sized(MEDIUM, device)
    hardware = calibrated(device) if device.type == "cuda" else find_hardware(STAND_IN)
    torch.set_num_threads(1)
    rivals: dict[str, Callable[[], None]] = {}
    seconds: dict[str, float] = {}
    for microbatch, recompute in CHOICES:
        strategy = strategy_of(size, device, microbatch, recompute)
        name = strategy_name(resolved(strategy))
        seconds[name] = predict(size.model(), hardware, strategy).step_s
        rivals[name] = step_of(size, strategy, device)
    samples = sample_warm(rivals, rounds, 1, partial(synchronize, device), WARM_UP)
    print(f"\n{size.title}, {size.samples * size.microbatches} samples a step: predicted and measured, ms")
    found = {}
    for name, guess in seconds.items():
        took = median_s(samples, name)
        print(f"  {name:<48}{guess * 1e3:10.2f}{took * 1e3:10.2f}")
        print(Target("distance of the predicted from the measured", abs(guess / took - 1), MOST_APART))
        found[name] = {"predicted_s": guess, "measured_s": took}
    orders = [sorted(found, key=lambda name: found[name][which]) for which in ("predicted_s", "measured_s")]
    print(
        Target("strategies that are ranked otherwise", sum(a != b for a, b in zip(*orders, strict=True)), 0), flush=True
    )
    return {"strategies": found, "hardware": hardware.model_dump(mode="json", exclude_none=True)}


def calibrated(device: torch.device) -> Hardware:
    """Return the description of this device that `quintsched calibrate` measures."""
    with TemporaryDirectory() as folder:
        return calibrate(device, Path(folder) / "measured.json")


def strategy_of(size: Size, device: torch.device, microbatch: int, recompute: str) -> Strategy:
    samples = size.samples * size.microbatches
    dtype = "bf16" if device.type == "cuda" else "fp32"
    return Strategy(gpus=1, microbatch=microbatch, recompute=recompute, batch=samples, seq=size.length, dtype=dtype)


def step_of(size: Size, strategy: Strategy, device: torch.device) -> Callable[[], None]:
    """Return a step of a strategy, on the common batch."""
    plan, dtype = plan_of(size.model(), strategy), torch.bfloat16 if strategy.dtype == "bf16" else torch.float32
    engine = Engine(plan, size.blocks(), cross_entropy_sum, AdamW, dtype=dtype, transport=alone(device))
    return whole(engine.step, size.batch(device), device)
