"""Strategies of sharing one training over two processes, side by side: samples per second and memory, on gloo.

    python benchmarks/strategies.py [--rounds 20] [--json]

    vanilla      data parallelism: two replicas, gradients summed by the transport's own all-reduce
    pipeline     two stages, 1F1B, four microbatches
    zero-1..3    two replicas that shard optimizer state, gradients, weights
    ring, tree   vanilla, with the all-reduce expanded into messages
    torch's      DistributedDataParallel; with ZeroRedundancyOptimizer; FSDP2 (`fully_shard`), which shards all

All train the same layers with AdamW on the same batches, and their losses must agree before anything is timed. Times
are paired round by round (see paired.py). Memory is that of fresh processes, one pair for each: the rise of the
resident peak by three steps, above the level before the layers were built.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from paired import Samples, Target, median_s, merge, ratios, report, run_processes, sample, status_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import quintsched as qs
from quintsched.runtime import Engine, connect

WIDTH, DEPTH, ROWS = 1024, 8, 64
BUCKET_MB = 5
"""Bucket of one layer's gradients: buckets in transfer take memory, too."""
VANILLA, AGAIN, DDP, ZERO_OPTIMIZER, FSDP = (
    "vanilla",
    "vanilla again",
    "torch: DDP",
    "torch: ZeRO optimizer",
    "torch: FSDP2",
)
FINE = {"schedule": "interleaved-1f1b", "chunks": DEPTH}
"""Options for a stage per layer, as in FSDP2 below: weights are gathered and freed layer by layer."""
PLANS: Mapping[str, dict[str, Any]] = {
    VANILLA: {"mesh": "dp=2"},
    AGAIN: {"mesh": "dp=2"},
    "pipeline": {"mesh": "pp=2", "microbatches": 4},
    "zero-1": {"mesh": "dp=2", "zero": 1},
    "zero-2": {"mesh": "dp=2", "zero": 2, **FINE},
    "zero-3": {"mesh": "dp=2", "zero": 3, **FINE},
    "ring": {"mesh": "dp=2", "communication": "ring"},
    "tree": {"mesh": "dp=2", "communication": "tree"},
}
TORCH = (DDP, ZERO_OPTIMIZER, FSDP)
RIVALS_OF = {VANILLA: DDP, "zero-1": ZERO_OPTIMIZER, "zero-3": FSDP}
"""Torch's counterpart of a strategy."""


def layers(width: int) -> list[nn.Module]:
    """Return the layers with the weights that all start from."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(DEPTH)]


def summed_squares(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the samples of their mean squared error, and their number."""
    return (output - targets).square().mean(1).sum(), torch.tensor(float(len(output)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all rivals."""
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=True)


def rival(name: str, rank: int, width: int = WIDTH) -> Callable[[], Tensor]:
    """Return a training step on this rank; it returns the mean loss (torch's: that of the replica)."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, ROWS, width)
    return ours(name, rank, inputs, targets) if name in PLANS else torchs(name, rank, inputs, targets)


def ours(name: str, rank: int, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """Return a step of an engine."""
    plan = qs.compile(**{"schedule": "1f1b", "microbatches": 1, **PLANS[name]})
    engine = Engine(
        plan, layers(inputs.shape[1]), summed_squares, adamw, bucket_mb=BUCKET_MB, transport=connect("gloo", 60)
    )
    share = slice(engine.replica * ROWS // engine.num_replicas, (engine.replica + 1) * ROWS // engine.num_replicas)
    return lambda: engine.step(inputs[share], targets[share]).loss


def torchs(name: str, rank: int, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    """Return a hand-written step with PyTorch's DDP, ZeRO optimizer or FSDP2."""
    model: nn.Module = nn.Sequential(*layers(inputs.shape[1]))
    if name == FSDP:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        optimizer = adamw(model.parameters())
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
        optimizer = adamw(model.parameters())
        if name == ZERO_OPTIMIZER:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, foreach=True
            )
    own_inputs, own_targets = inputs.chunk(2)[rank], targets.chunk(2)[rank]

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=name != ZERO_OPTIMIZER)
        loss = summed_squares(model(own_inputs), own_targets)[0] / len(own_inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure_time(rank: int, rounds: int) -> Samples:
    """Time all rivals on this rank, after a check that their losses agree."""
    rivals = {name: rival(name, rank) for name in (*PLANS, *TORCH)}
    for _ in range(3):
        losses = {name: step().to(torch.float64).reshape(1) for name, step in rivals.items()}
        for name in TORCH:
            dist.all_reduce(losses[name])
            torch.testing.assert_close(losses[VANILLA], losses[name] / 2, rtol=1e-4, atol=1e-5)
        for name in PLANS:
            torch.testing.assert_close(losses[VANILLA], losses[name], rtol=1e-4, atol=1e-5)
    return sample(rivals, rounds, 1, dist.barrier)


def measure_memory(rank: int, name: str) -> int:
    """Return the rise of this process's peak, in bytes, by a rival's layers and three steps.

    A run with tiny layers comes first, so that imports and set-up are not counted.
    """
    rival(name, rank, 8)()
    gc.collect()
    dist.barrier()
    before = status_bytes("VmRSS")
    step = rival(name, rank)
    for _ in range(3):
        step()
    return status_bytes("VmHWM") - before


def measure_all_memory() -> dict[str, float]:
    """Return the peak of the rank that holds most, in MB, of each rival."""
    # Blocks of a megabyte or more go back to the system when they are freed, so that resident means held.
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**20)):
        names = [name for name in (*PLANS, *TORCH) if name != AGAIN]
        return {name: max(run_processes(measure_memory, 2, name, timeout_s=120)) / 1e6 for name in names}


def table(samples: Samples, peaks: Mapping[str, float]) -> None:
    """Print samples per second and peak memory, as the documents behind this project have them."""
    print(f"\n{DEPTH} layers, {WIDTH} wide, {ROWS} samples a step, two processes")
    print(f"  {'':<24}{'samples/s':>10}{'peak MB per rank':>18}")
    for name, peak in peaks.items():
        print(f"  {name:<24}{ROWS / median_s(samples, name):10.0f}{peak:18.1f}")


def targets(samples: Samples, peaks: Mapping[str, float]) -> list[Target]:
    """Return the targets beside torch's: at least as fast (the interval reaches down to 1), and no more memory."""
    found = []
    for mine, its in RIVALS_OF.items():
        found.append(Target(f"least time, {mine} / {its}", ratios(samples, mine, its, 0).low, 1.0))
        found.append(Target(f"memory, {mine} / {its}", peaks[mine] / peaks[its], 1.0))
    return found


def main() -> int:
    """Measure, print, and return whether a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the comparison, at least 6 (default 20)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.rounds < 6:
        parser.error("an interval of 95 % takes at least 6 rounds")
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        peaks = measure_all_memory()
        samples = merge(run_processes(measure_time, 2, arguments.rounds, timeout_s=600))
        table(samples, peaks)
        wanted = targets(samples, peaks)
        figures = report("time of a step", samples, 1, VANILLA, wanted)
    if arguments.json:
        print(json.dumps({**figures, "peak_mb": peaks}, indent=1))
    return int(any(target.figure > target.limit for target in wanted))


if __name__ == "__main__":
    sys.exit(main())
