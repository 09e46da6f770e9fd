"""What a GPU says: the engine beside a plain PyTorch loop, split backwards bit for bit, and ranks that share the GPU.

    python benchmarks/gpu.py [--only step|numbers|ranks] [--rounds 40] [--json] [--device cuda]

    step      one rank, a GPT in bf16: the engine's step against a plain loop that does the same job, with large
              microbatches, where the GPU is busy, and with small ones, where the host is
    numbers   one rank: chunks and split backwards against that loop, the largest difference of any weight
    ranks     two processes over NCCL: step time and bubble of a few schedules, from their traces

The same job: gradients added up over the microbatches in float32, divided by the batch's weight, their norm and the
finite check, AdamW on float32 masters, rounding to bf16. Ratios are paired round by round (see paired.py).

Where there is one GPU the two processes share it, which NCCL allows from 2.30 on. They take turns on it: what one
computes holds up the other, and what is measured is the runtime over NCCL rather than the schedule. `--device cpu`
tries the script itself, with tiny sizes and over gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from paired import Target, ratios, report, run_processes, sample
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import quintsched as qs
from quintsched.runtime import Engine, Transport, build_model, connect
from quintsched.runtime.comm import LocalTransport, LocalWorld
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.losses import cross_entropy_sum
from quintsched.trace.measured import Trace

PLAIN, AGAIN = "plain loop", "plain loop again"
WARM_UP = 5
NUMBERS_STEPS = 5
TRACED = range(10, 20)
SPLIT = [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2)]
RANKS = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zbv", 2)]
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
AdamW = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class Size:
    """A GPT, and what a step feeds it."""

    title: str
    hidden: int
    depth: int
    heads: int
    tokens: int
    length: int
    samples: int
    """Samples of a microbatch."""
    microbatches: int
    steps: int
    """Steps of one sample of the measurement."""

    def blocks(self) -> Sequence[Callable[[], nn.Module]]:
        data = DataSpec(input_shape=(self.length,), num_classes=self.tokens)
        return gpt(data, GPTOptions(hidden=self.hidden, depth=self.depth, heads=self.heads))

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ids and the ids that follow them."""
        random = torch.Generator().manual_seed(0)
        shape = (self.microbatches * self.samples, self.length + 1)
        ids = torch.randint(0, self.tokens, shape, generator=random).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def plan(self, schedule: str, chunks: int, pp: int = 1) -> qs.Plan:
        return qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=self.microbatches, chunks=chunks)


LARGE = Size("large microbatches", 2048, 8, 16, 32768, 1024, samples=4, microbatches=8, steps=1)
SMALL = Size("small microbatches", 512, 4, 8, 4096, 128, samples=1, microbatches=8, steps=4)
TINY = Size("tiny", 32, 2, 4, 64, 16, samples=1, microbatches=4, steps=1)


def sizes(device: torch.device) -> tuple[Size, ...]:
    return (LARGE, SMALL) if device.type == "cuda" else (TINY,)


class PlainLoop:
    """What one writes by hand: a loop over the microbatches that adds up gradients in float32."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self._microbatches = size.microbatches
        self._model = build_model(size.blocks(), 0, torch.bfloat16).to(device)
        self._weights = list(self._model.parameters())
        self._masters = {name: nn.Parameter(p.detach().float()) for name, p in self._model.named_parameters()}
        numels = [p.numel() for p in self._weights]
        self._flat = torch.zeros(sum(numels), device=device)
        self._sums = [v.view_as(p) for v, p in zip(self._flat.split(numels), self._weights, strict=True)]
        for master, view in zip(self._masters.values(), self._sums, strict=True):
            master.grad = view
        self._optimizer = AdamW(list(self._masters.values()))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch; returns its loss."""
        losses, weights = [], []
        pieces = (tensor.split(tensor.shape[0] // self._microbatches) for tensor in (inputs, targets))
        for some_inputs, some_targets in zip(*pieces, strict=True):
            loss, weight = cross_entropy_sum(self._model(some_inputs), some_targets)
            loss.backward()
            torch._foreach_add_(self._sums, [p.grad for p in self._weights])
            for p in self._weights:
                p.grad = None
            losses.append(loss.detach())
            weights.append(weight)
        total = torch.stack(weights).sum(dtype=torch.float64)
        self._flat.div_(total)
        if math.isfinite(torch.linalg.vector_norm(self._flat).item()):
            self._optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self._weights, list(self._masters.values()))
        self._flat.zero_()
        return torch.stack(losses).sum(dtype=torch.float64) / total

    def masters(self) -> Mapping[str, Tensor]:
        return self._masters


def make_engine(size: Size, plan: qs.Plan, transport: Transport, trace_steps: range | None = None) -> Engine:
    return Engine(
        plan,
        size.blocks(),
        cross_entropy_sum,
        AdamW,
        dtype=torch.bfloat16,
        trace_steps=trace_steps,
        transport=transport,
    )


def alone(device: torch.device) -> Transport:
    return LocalTransport(LocalWorld(1, device=device), 0)


def masters_of(engine: Engine) -> dict[str, Tensor]:
    stages = engine.stages.values()
    return {name: engine.masters.of(p) for stage in stages for name, p in stage.named_weights().items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare_steps(size: Size, device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return how long the engine's steps take beside the plain loop's."""

    def whole(step: Callable[[Tensor, Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            step(*batch)
            synchronize(device)

        return run

    batch = size.batch(device)
    rivals = {name: whole(PlainLoop(size, device).step) for name in (PLAIN, AGAIN)}
    for schedule, chunks in (("1f1b", 1), ("interleaved-zb", 2)):
        engine = make_engine(size, size.plan(schedule, chunks), alone(device))
        rivals[f"quintsched, {schedule}"] = whole(engine.step)
    for step in rivals.values():
        for _ in range(WARM_UP):
            step()
    gc.collect()
    gc.freeze()
    samples = sample(rivals, rounds, size.steps, partial(synchronize, device))
    gc.unfreeze()
    target = Target("time against the plain loop", ratios(samples, "quintsched, 1f1b", PLAIN, 0).median, 1.01)
    return report(f"{size.title}, {size.microbatches} of them", samples, size.steps, PLAIN, [target])


def compare_numbers(size: Size, device: torch.device) -> dict[str, float]:
    """Print and return by how much weights differ from the plain loop's after a few steps.

    The attention is that of plain products: the faster kernels add up in an order that changes from run to run.
    """
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


def run_rank(rank: int, device_type: str, size: Size, folder: str) -> dict[str, float]:
    """Run a few schedules on one of two ranks; returns seconds a step, and leaves a trace of each."""
    os.environ["LOCAL_RANK"] = str(rank)
    found = {}
    for schedule, chunks in RANKS:
        transport = connect("nccl" if device_type == "cuda" else "gloo", timeout_s=120)
        engine = make_engine(size, size.plan(schedule, chunks, pp=2), transport, trace_steps=TRACED)
        inputs, targets = size.batch(transport.device)
        batch = (inputs if engine.needs_inputs else None, targets if engine.needs_targets else None)
        times = []
        for _ in range(TRACED.stop):
            engine.everyone.barrier()
            since = time.perf_counter()
            engine.step(*batch)
            synchronize(transport.device)
            times.append(time.perf_counter() - since)
        engine.save_trace(Path(folder) / schedule)
        engine.everyone.barrier()
        engine.close()
        dist.barrier()
        found[schedule] = statistics.median(times[WARM_UP : TRACED.start])
    return found


def compare_ranks(size: Size, device: torch.device) -> dict[str, dict[str, float]]:
    """Print and return step time and bubble of schedules on two ranks; nothing where NCCL does not let them share."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    if torch.cuda.device_count() < 2:
        os.environ |= SHARING
    found = {}
    with TemporaryDirectory() as folder:
        try:
            ranks = run_processes(run_rank, 2, device.type, size, folder, timeout_s=240)
        except mp.ProcessRaisedException as error:
            if "ncclInvalidUsage" not in str(error):
                raise
            print("\ntwo ranks: left out, since two ranks on one GPU want NCCL 2.30")
            return {}
        print(f"\ntwo ranks, {size.title}, {size.microbatches} of them: median step, and the bubble of a traced one")
        for schedule, chunks in RANKS:
            plan = size.plan(schedule, chunks, pp=2)
            trace = Trace.load(Path(folder) / schedule, plan)
            step_ms = max(of_rank[schedule] for of_rank in ranks) * 1e3
            bubble, simulated = trace.step().bubble, plan.simulate(trace.costs()).bubble
            print(f"  {schedule:<18}{step_ms:9.2f} ms   bubble {bubble:6.1%}   simulated {simulated:6.1%}", flush=True)
            found[schedule] = {"ms": step_ms, "bubble": bubble, "simulated_bubble": simulated}
    return found


def run_parts(only: str | None, device: torch.device, rounds: int) -> dict[str, Any]:
    """Run one part or all; print tables, and return the figures by part."""
    found: dict[str, Any] = {}
    if only in (None, "step"):
        found["step"] = {size.title: compare_steps(size, device, rounds) for size in sizes(device)}
    if only in (None, "numbers"):
        found["numbers"] = compare_numbers(sizes(device)[-1], device)
    if only in (None, "ranks"):
        found["ranks"] = compare_ranks(sizes(device)[0], device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["step", "numbers", "ranks"], help="run one part")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each comparison, at least 6 (default 40)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script itself")
    parser.add_argument(
        "--json", action="store_true", help="figures as JSON to standard output, tables to standard error"
    )
    chosen = parser.parse_args()
    if chosen.rounds < 6:
        parser.error("an interval of 95 % takes at least 6 rounds")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--device cpu tries the script itself)", file=sys.stderr)
        return
    with redirect_stdout(sys.stderr if chosen.json else sys.stdout):
        found = run_parts(chosen.only, torch.device(chosen.device), chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
