"""Data parallelism beside PyTorch's DDP and FSDP2, over two processes, on gloo, in one run: step time and memory.

    python benchmarks/beside_torch.py [--rounds 30] [--shape small layers nanogpt] [--json]

    ours, again      two replicas: gradients all-reduced, norm taken, steps that are not finite skipped, as always
    DDP              DistributedDataParallel alone
    DDP, guarded     with the same guarantees: `clip_grad_norm_`, and a check that the norm is finite
    zero-3           ours, everything sharded               FSDP2     `fully_shard`, layer by layer
    alone            the whole batch in one process, by a hand-written loop

Shapes: `small`, 4 layers 64 wide, whose step takes 2 ms; `layers`, 8 layers 1024 wide; `nanogpt`, 6 layers 384 wide.
Losses must agree before anything is timed. Times are paired round by round (see paired.py). `--memory` measures fresh
processes: resident memory before the first step, and the peak of three steps, above the level before the layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from paired import Samples, Target, merge, ratios, report, run_processes, sample, status_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import quintsched as qs
from quintsched.runtime import Engine, build_model, connect
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt

OURS, AGAIN, ZERO, DDP, GUARDED, FSDP, ALONE = (
    "ours",
    "ours again",
    "ours: zero-3",
    "torch: DDP",
    "torch: DDP, guarded",
    "torch: FSDP2",
    "torch: alone",
)
CLIP = 1.0
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """A benchmark: the blocks, a batch (inputs, targets) of both replicas, the loss, and steps per sample."""

    blocks: Callable[[], list[nn.Module]]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], tuple[Tensor, float]]
    steps: int


def layers(width: int, depth: int) -> list[nn.Module]:
    """Return `depth` layers of a width."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]


def squares(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Return the sum over the samples of their mean squared error, and the number of samples."""
    return (output - targets).square().mean(1).sum(), float(len(output))


def tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Return the sum of the tokens' cross-entropy, and their number."""
    return cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), float(targets.numel())


def nanogpt() -> list[nn.Module]:
    """Return the blocks of a GPT of nanoGPT's shape for characters."""
    spec = DataSpec(input_shape=(128,), num_classes=65)
    options = GPTOptions(depth=6, heads=6, hidden=384)
    return list(build_model(gpt(spec, options), seed=0))


def normal(width: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch of normally distributed numbers."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, rows, width)
    return inputs, targets


def characters() -> tuple[Tensor, Tensor]:
    """Return a batch of 4 sequences."""
    torch.manual_seed(1)
    inputs, targets = torch.randint(65, (2, 4, 128))
    return inputs, targets


SHAPES: Mapping[str, Shape] = {
    "small": Shape(lambda: layers(64, 4), lambda: normal(64, 256), squares, 20),
    "layers": Shape(lambda: layers(1024, 8), lambda: normal(1024, 64), squares, 1),
    "nanogpt": Shape(nanogpt, characters, tokens, 1),
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all rivals."""
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


def rival(name: str, rank: int, shape: Shape) -> Step:
    """Return a training step on this rank; it returns the mean loss, of the batch, or (torch's) of the replica."""
    inputs, targets = shape.batch()
    if name != ALONE:
        inputs, targets = inputs.chunk(2)[rank], targets.chunk(2)[rank]
    return ours(name, shape, inputs, targets) if name in (OURS, AGAIN, ZERO) else torchs(name, shape, inputs, targets)


def ours(name: str, shape: Shape, inputs: Tensor, targets: Tensor) -> Step:
    """Return a step of an engine."""
    blocks = shape.blocks()
    if name == ZERO:
        plan = qs.compile("interleaved-1f1b", mesh="dp=2", microbatches=1, chunks=len(blocks), zero=3)
    else:
        plan = qs.compile("1f1b", mesh="dp=2", microbatches=1)
    engine = Engine(plan, blocks, shape.loss, adamw, bucket_mb=5, transport=connect("gloo", 60))
    return lambda: engine.step(inputs, targets).loss


def torchs(name: str, shape: Shape, inputs: Tensor, targets: Tensor) -> Step:
    """Return a hand-written step with PyTorch's DDP, FSDP2, or a plain model."""
    model: nn.Module = nn.Sequential(*shape.blocks())
    if name == FSDP:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    elif name != ALONE:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=5)
    optimizer = adamw(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        total, weight = shape.loss(model(inputs), targets)
        loss = total / weight
        loss.backward()
        if name != GUARDED or torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).isfinite().item():
            optimizer.step()
        return loss.detach()

    return step


def measure_time(rank: int, shape_name: str, rounds: int) -> Samples:
    """Time all rivals on this rank, after a check that their losses agree."""
    shape = SHAPES[shape_name]
    rivals = {name: rival(name, rank, shape) for name in (OURS, AGAIN, DDP, GUARDED, ZERO, FSDP, ALONE)}
    for _ in range(3):
        losses = {name: step().to(torch.float64).reshape(1) for name, step in rivals.items()}
        for name in (DDP, FSDP):
            dist.all_reduce(losses[name])
            torch.testing.assert_close(losses[OURS], losses[name] / 2, rtol=1e-4, atol=1e-5)
        for name in (AGAIN, ZERO, ALONE):
            torch.testing.assert_close(losses[OURS], losses[name], rtol=1e-4, atol=1e-5)
    return sample(rivals, rounds, shape.steps, dist.barrier)


def measure_memory(rank: int, name: str, shape_name: str) -> list[int]:
    """Return the rise in resident bytes before a rival's first step, and at the peak of three steps.

    A run with tiny layers comes first, so that imports and set-up are not counted.
    """
    tiny = Shape(lambda: layers(8, 2), lambda: normal(8, 64), squares, 1)
    rival(name, rank, tiny)()
    gc.collect()
    dist.barrier()
    before = status_bytes("VmRSS")
    step = rival(name, rank, SHAPES[shape_name])
    made = status_bytes("VmRSS") - before
    for _ in range(3):
        step()
    return [made, status_bytes("VmHWM") - before]


def measure_all_memory(shape_name: str) -> dict[str, tuple[float, float]]:
    """Return, in MB, each rival's memory before the first step, and its peak, of the rank that holds most."""
    found = {}
    # Blocks of a megabyte or more go back to the system when they are freed, so that resident means held.
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**20)):
        for name in (OURS, ZERO, DDP, GUARDED, FSDP, ALONE):
            ranks = run_processes(measure_memory, 2, name, shape_name, timeout_s=120)
            found[name] = (max(made for made, _ in ranks) / 1e6, max(peak for _, peak in ranks) / 1e6)
    return found


def main() -> int:
    """Measure, print, and return whether a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    wanted: list[Target] = []
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        for name in arguments.shape:
            samples = merge(run_processes(measure_time, 2, name, arguments.rounds, timeout_s=600))
            limit = 1.05 if name == "small" else 1.03
            here = [
                Target(f"{name}: least time / DDP", ratios(samples, OURS, DDP, 0).low, limit),
                Target(f"{name}: least time / DDP, guarded", ratios(samples, OURS, GUARDED, 0).low, 1.0),
            ]
            figures[name] = report(f"{name}: time of a step", samples, SHAPES[name].steps, DDP, here)
            wanted += here
        if arguments.memory:
            peaks = figures["memory_mb"] = measure_all_memory("layers")
            print("\nlayers: MB per rank, before the first step and at the peak of three")
            for name, (made, peak) in peaks.items():
                print(f"  {name:<26}{made:9.1f}{peak:9.1f}")
            here = [
                Target("memory at the peak, zero-3 / FSDP2", peaks[ZERO][1] / peaks[FSDP][1], 1.0),
                Target("MB before the first step, ours - DDP", peaks[OURS][0] - peaks[DDP][0], 10.0),
                Target("MB before the first step, ours - alone", peaks[OURS][0] - peaks[ALONE][0], 10.0),
            ]
            print(*here, sep="\n", flush=True)
            wanted += here
    if arguments.json:
        print(json.dumps(figures, indent=1))
    return int(any(target.figure > target.limit for target in wanted))


if __name__ == "__main__":
    sys.exit(main())
