"""Steps of the engine on one rank beside a plain loop that does the same job, and the results of both."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from paired import Target, ratios, report, sample_warm
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quintsched.runtime.train.throughput import peak_tflops_of

from .model import GPT_350M, LLAMA_1B, SMALL, PlainLoop, Size, alone, make_engine, masters_of, sized, synchronize, whole

PLAIN, AGAIN = "plain loop", "plain loop again"
GRAPH = ", CUDA graph"
WARM_UP, NUMBERS_STEPS, MOST, MOST_FROM_GRAPH = 5, 5, 1.01, 1.0
SPLIT = [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2)]


def steps(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return step times: of large microbatches, which keep a GPU busy, and of small ones."""
    sizes = (GPT_350M, LLAMA_1B, SMALL) if device.type == "cuda" else (sized(SMALL, device),)
    return {size.title: compare_steps(size, device, rounds) for size in sizes}


def compare_steps(size: Size, device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return the engine's step times beside the plain loop's; a CPU has no graphs."""
    batch = size.batch(device)
    plain = PlainLoop(size, device)
    rivals = {name: whole(plain.step, batch, device) for name in (PLAIN, AGAIN)}
    captured = [False, True] if size is SMALL else [False]
    schedules = (("1f1b", 1), ("interleaved-zb", 2)) if size is not LLAMA_1B else (("1f1b", 1),)
    for (schedule, chunks), cuda_graph in product(schedules, captured):
        engine = make_engine(size, size.plan(schedule, chunks), alone(device), cuda_graph=cuda_graph)
        rivals[f"quintsched, {schedule}{GRAPH if cuda_graph else ''}"] = whole(engine.step, batch, device)
    samples = sample_warm(rivals, rounds, size.steps, partial(synchronize, device), WARM_UP)
    targets = [
        Target(f"{rival.removeprefix('quintsched, ')}: time against the plain loop", ratio.median, most)
        for rival, most in (("quintsched, 1f1b", MOST), *((r, MOST_FROM_GRAPH) for r in rivals if r.endswith(GRAPH)))
        for ratio in [ratios(samples, rival, PLAIN, 0)]
    ]
    title = f"{size.title}, {size.microbatches} microbatches of {size.samples} x {size.length} tokens"
    found = report(title, samples, size.steps, PLAIN, targets)
    for rival, figures in found["rivals"].items():
        figures |= rates(size, figures["ms"] / 1e3, device)
        print(f"  {rival:<26}{figures['tokens_per_s']:12,.0f} tokens/s   MFU {figures['mfu']:.1%}", flush=True)
    return found


def rates(size: Size, seconds: float, device: torch.device) -> dict[str, float]:
    """Return tokens per second, and the fraction of the device's peak in bf16; not a number where that is unknown."""
    peak = (peak_tflops_of(device, "bfloat16") or math.nan) * 1e12
    return {"tokens_per_s": size.tokens_in_step / seconds, "mfu": size.flops / seconds / peak}


def numbers(device: torch.device, rounds: int) -> dict[str, float]:
    """Print and return the largest difference of weights from the plain loop's after a few steps.

    Attention uses the math kernel: the faster kernels add in an order that changes from run to run.
    """
    size = sized(SMALL, device)
    batch, plain = size.batch(device), PlainLoop(size, device)
    found = {}
    print(f"\n{size.title}: weights after {NUMBERS_STEPS} steps against the plain loop's, attention by plain products")
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(NUMBERS_STEPS):
            plain.step(*batch)
        expected = plain.masters()
        for schedule, chunks in SPLIT:
            engine = make_engine(size, size.plan(schedule, chunks), alone(device))
            for _ in range(NUMBERS_STEPS):
                engine.step(*batch)
            apart = max(largest_difference(weight, expected[name]) for name, weight in masters_of(engine).items())
            print(Target(f"{schedule}, chunks={chunks}: largest difference", apart, 0.0), flush=True)
            found[schedule] = apart
    return found


def largest_difference(found: Tensor, expected: Tensor) -> float:
    return (found.detach() - expected.detach()).abs().max().item()
