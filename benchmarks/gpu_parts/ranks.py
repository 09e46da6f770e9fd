"""Two and four ranks over NCCL: the engine beside torch.distributed.pipelining, bubbles, predictions and memory.

Where there are fewer GPUs than ranks they share one, which NCCL allows from 2.30 on. They take turns on it: one rank's
computation blocks the other, so the figure shows the runtime over NCCL rather than the schedule.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from paired import Target, merge, ratios, report, run_processes, sample

from quintsched.runtime import connect
from quintsched.trace.measured_trace import Trace

from . import memory
from .model import SHARED, make_engine, share_of, sized, synchronize, whole
from .rivals import SCHEDULES, chunks_of, torch_step
from .sharing import CannotShareError, environment, reason_to_skip

OURS, TORCH = "quintsched", "torch"
WARM_UP, TRACED, TIMEOUT_S = 5, range(10, 20), 400.0
WORLDS = (2, 4)
TRACES = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zbv", 2)]
MEMORIES = [("1f1b", 1), ("zbv", 2)]
MOST, MOST_APART = 1.02, 0.05
MOST_ROUNDS = 12
"""Limit of rounds: steps of ranks that share a GPU take long, and there are eight comparisons of them."""


def beside_torch(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return step times beside torch's, of four schedules on two and four ranks."""
    found = {}
    for world in WORLDS:
        for schedule in SCHEDULES:
            ranks = _run(world, device, compare_rank, schedule, min(rounds, MOST_ROUNDS))
            if ranks is None:
                continue
            samples, title = merge(ranks), f"{schedule} on {world} ranks"
            target = Target("time against torch's", ratios(samples, OURS, TORCH, 0).median, MOST)
            found[title] = report(f"{title}, {sized(SHARED, device).title}", samples, 1, TORCH, [target])
    return found


def compare_rank(rank: int, world: int, device_type: str, schedule: str, rounds: int) -> Any:
    """Return the samples of one rank; losses of both have to agree before anything is timed."""
    os.environ["LOCAL_RANK"] = str(rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    transport = connect("nccl" if device_type == "cuda" else "gloo", timeout_s=120)
    device, size = transport.device, sized(SHARED, torch.device(device_type))
    plan = size.plan(schedule, chunks_of(schedule), world)
    engine = make_engine(size, plan, transport, dtype=torch.float32)
    group = dist.new_group(backend=transport.name)
    batch = size.batch(device)
    theirs, ours = torch_step(size, schedule, plan, device, group), partial(engine.step, *share_of(engine, batch))
    for _ in range(WARM_UP):
        losses = ours().loss.item(), theirs(*batch)
    if abs(losses[0] - losses[1]) > 1e-3 * losses[1]:
        raise RuntimeError(f"{schedule}: after {WARM_UP} steps the loss is {losses[0]}, torch's {losses[1]}")
    rivals: dict[str, Callable[[], None]] = {
        OURS: whole(ours, (), device),
        f"{OURS} again": whole(ours, (), device),
        TORCH: whole(theirs, batch, device),
    }
    gc.collect()
    gc.freeze()
    samples = sample(rivals, rounds, 1, partial(_meet, device))
    dist.barrier()
    engine.close()
    return samples


def bubbles(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return step time, bubble and predicted step of schedules on two ranks, from their traces."""
    size = sized(SHARED, device)
    with TemporaryDirectory() as folder:
        ranks = _run(2, device, trace_rank, folder)
        if ranks is None:
            return {}
        print(f"\ntwo ranks, {size.title}, {size.microbatches} of them: median step, and a traced one")
        found = {}
        for schedule, chunks in TRACES:
            plan = size.plan(schedule, chunks, 2)
            trace = Trace.load(Path(folder) / schedule, plan)
            simulation = plan.simulate(trace.costs())
            step_ms = max(of_rank[schedule] for of_rank in ranks) * 1e3
            bubble, simulated = trace.step().bubble, simulation.bubble
            print(f"  {schedule:<18}{step_ms:9.2f} ms   bubble {bubble:6.1%}   simulated {simulated:6.1%}")
            apart = abs(simulation.makespan / trace.step().makespan - 1)
            print(Target("distance of the step that its costs predict", apart, MOST_APART), flush=True)
            found[schedule] = {"ms": step_ms, "bubble": bubble, "simulated_bubble": simulated, "apart": apart}
    return found


def trace_rank(rank: int, world: int, device_type: str, folder: str) -> dict[str, float]:
    """Run a few schedules on one rank; return seconds per step, and save a trace of each."""
    os.environ["LOCAL_RANK"] = str(rank)
    size, found = sized(SHARED, torch.device(device_type)), {}
    for schedule, chunks in TRACES:
        transport = connect("nccl" if device_type == "cuda" else "gloo", timeout_s=120)
        engine = make_engine(size, size.plan(schedule, chunks, pp=world), transport, trace_steps=TRACED)
        batch = share_of(engine, size.batch(transport.device))
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


def rank_memory(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return counted and simulated peaks of both ranks of a pipeline; skipped where no allocator counts."""
    if device.type != "cuda":
        print("\nmemory of two ranks: left out, no allocator counts on a CPU")
        return {}
    ranks = _run(2, device, memory_rank)
    if ranks is None:
        return {}
    print(f"\npeak of a step on two ranks, {SHARED.title}, in MiB")
    for schedule, _ in MEMORIES:
        for rank, of_rank in enumerate(ranks):
            memory.show(f"{schedule}, rank {rank}", of_rank[schedule])
    return {schedule: [of_rank[schedule] for of_rank in ranks] for schedule, _ in MEMORIES}


def memory_rank(rank: int, world: int, device_type: str) -> dict[str, dict[str, float]]:
    os.environ["LOCAL_RANK"] = str(rank)
    found = {}
    for schedule, chunks in MEMORIES:
        transport = connect("nccl", timeout_s=120)
        found[schedule] = memory.peaks(SHARED, schedule, chunks, transport, pp=world)
        _meet(transport.device)
        transport.close()
        dist.barrier()
    return found


def _run(world: int, device: torch.device, work: Callable[..., Any], *more: Any) -> list[Any] | None:
    """Return the results of `work` by rank; None, with a message, where so many ranks cannot run."""
    reason = reason_to_skip(world) if device.type == "cuda" else ""
    try:
        variables = environment(world) if device.type == "cuda" and not reason else {}
    except CannotShareError as error:
        reason = str(error)
    if reason:
        print(f"\n{world} ranks: left out, {reason}", flush=True)
        return None
    with patch.dict(os.environ, variables):
        return run_processes(work, world, world, device.type, *more, timeout_s=TIMEOUT_S)


def _meet(device: torch.device) -> None:
    synchronize(device)
    dist.barrier()
