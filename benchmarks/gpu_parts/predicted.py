"""Predictions on one rank from measurements by `calibrate` here, beside measured steps and peaks of memory.

calibrate ──▶ description of this GPU ──▶ predicted seconds and bytes of 12 strategies ─┬▶ ratios, and their order
                                          measured seconds and bytes of the same ───────┘
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from paired import Target
from prediction import kendall_tau

from quintsched.runtime import Engine
from quintsched.runtime.calibrate.machine_description import calibrate
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.presets_and_files import find_hardware
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import strategy_name
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.prediction.strategy_plans import plan_of

from .model import GPT_350M, LLAMA_300M, MEDIUM, TINY, AdamW, Size, alone, synchronize, whole

WARM_UP, STEPS = 3, 8
MOST_APART, MOST_MEMORY_APART, LEAST_TAU = 0.05, 0.03, 0.8
STAND_IN = "a100-80gb"
"""Hardware assumed for a CPU, to try the script itself."""
MODELS: Mapping[Size, tuple[int, tuple[int, int]]] = {
    MEDIUM: (32, (4, 16)),
    GPT_350M: (16, (2, 8)),
    LLAMA_300M: (8, (1, 4)),
}
"""Samples of a step, and of a microbatch, by model."""
RECOMPUTED = ("none", "full")


def predicted(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return predicted and measured seconds and peaks of a step."""
    on_gpu = device.type == "cuda"
    hardware = calibrated(device) if on_gpu else find_hardware(STAND_IN)
    torch.set_num_threads(1)
    print("\npredicted and measured: ms, MiB")
    found: dict[str, dict[str, float]] = {}
    for size, (samples, microbatches) in (MODELS if on_gpu else {TINY: (4, (1, 4))}).items():
        for microbatch, recompute in product(microbatches, RECOMPUTED):
            dtype = "bf16" if on_gpu else "fp32"
            strategy = Strategy(
                gpus=1, microbatch=microbatch, recompute=recompute, batch=samples, seq=size.length, dtype=dtype
            )
            guess = predict(size.model(), hardware, strategy)
            seconds, peak = measured(size, strategy, device)
            name = f"{size.title}, {strategy_name(resolved(strategy))}"
            figures = {"s": guess.step_s, "measured_s": seconds, "bytes": guess.memory_bytes, "measured_bytes": peak}
            found[name] = figures | {f"{term}_s": value for term, value in guess.breakdown_s.items()}
            memory = f"{guess.memory_bytes / 2**20:10.0f}{peak / 2**20:10.0f}" if on_gpu else ""
            print(f"  {name:<64}{guess.step_s * 1e3:10.2f}{seconds * 1e3:10.2f}{memory}", flush=True)
    apart = [abs(figures["s"] / figures["measured_s"] - 1) for figures in found.values()]
    print(Target("largest distance of a predicted step", max(apart), MOST_APART))
    print(Target("median distance of a predicted step", median(apart), MOST_APART))
    if on_gpu:
        apart = [abs(figures["bytes"] / figures["measured_bytes"] - 1) for figures in found.values()]
        print(Target("largest distance of a predicted peak", max(apart), MOST_MEMORY_APART))
    tau = kendall_tau(*([figures[which] for figures in found.values()] for which in ("s", "measured_s")))
    print(Target("1 - Kendall's tau", 1 - tau, round(1 - LEAST_TAU, 3)), flush=True)
    return {"strategies": found, "hardware": hardware.model_dump(mode="json", exclude_none=True)}


def calibrated(device: torch.device) -> Hardware:
    """Return the description of this device that `quintsched calibrate` measures."""
    with TemporaryDirectory() as folder:
        return calibrate(device, Path(folder) / "measured.json")


def measured(size: Size, strategy: Strategy, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a step, and the peak bytes of the allocator (0 on a CPU)."""
    before = _allocated(device)
    plan, dtype = plan_of(size.model(), strategy), torch.bfloat16 if strategy.dtype == "bf16" else torch.float32
    engine = Engine(plan, size.blocks(), cross_entropy_sum, AdamW, dtype=dtype, transport=alone(device))
    inputs, targets = size.batch(device)
    step = whole(engine.step, (inputs[: strategy.batch], targets[: strategy.batch]), device)
    for _ in range(WARM_UP):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS):
        since = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - since)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    engine.close()
    return median(seconds), float(peak)


def _allocated(device: torch.device) -> int:
    gc.collect()
    synchronize(device)
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0
