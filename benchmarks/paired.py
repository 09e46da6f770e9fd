"""Fair comparison of rivals on a noisy machine: in turn, in many short rounds, each compared with its own neighbours.

    round 0   hand  hand again  ours  torch        one sample = wall and CPU seconds of a few steps, after some untimed
    round 1   torch  ours  hand again  hand        ratio of a rival in a round = its sample / the baseline's sample
    round 2   ours  torch  hand  hand again        figure = median of the ratios, with a 95 % interval of that median

A disturbance of the machine longer than a round affects all rivals alike and leaves the ratios alone. The same loop
twice ("hand again") shows the difference between two equal rivals. Before a sample its rival runs a few steps untimed:
others have replaced its code and data in the processor's caches, which costs its next step up to twice its time, and a
loop that trains alone never has that. In several processes a sample's wall time is that
of the slowest process and its CPU time the sum over all, threads included.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

Samples = Mapping[str, Sequence[Sequence[float]]]
"""Per rival and round: (wall seconds, CPU seconds)."""

MOST_UNTIMED = 5
"""Steps until the caches hold what a rival uses: its first takes twice the time, its fifth a hundredth more."""


@dataclass(frozen=True)
class Interval:
    """A median with the interval that holds the true one in 95 of 100 runs."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:6.3f} [{self.low:.3f}, {self.high:.3f}]"


def sample(rivals: Mapping[str, Callable[[], object]], rounds: int, steps: int, meet: Callable[[], object]) -> Samples:
    """Run `steps` steps of each rival in each round; `meet` synchronizes all processes before each sample.

    A sample begins after as many untimed steps, at most `MOST_UNTIMED`.
    """
    names, untimed = list(rivals), min(steps, MOST_UNTIMED)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        order = names[start:] + names[:start]
        for name in order if number % 2 == 0 else reversed(order):
            step = rivals[name]
            for _ in range(untimed):
                step()
            meet()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(steps):
                step()
            wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
            samples[name].append((wall_s, cpu_s))
    return samples


def sample_warm(
    rivals: Mapping[str, Callable[[], object]], rounds: int, steps: int, meet: Callable[[], object], warm_up: int
) -> Samples:
    """Sample after `warm_up` steps of each rival; the garbage collector ignores all earlier objects."""
    for step in rivals.values():
        for _ in range(warm_up):
            step()
    gc.collect()
    gc.freeze()
    try:
        return sample(rivals, rounds, steps, meet)
    finally:
        gc.unfreeze()


def merge(ranks: Sequence[Samples]) -> Samples:
    """Return the samples of the whole run: the slowest process's wall time, the sum of the CPU times."""
    return {
        name: [
            (max(wall for wall, _ in together), sum(cpu for _, cpu in together))
            for together in zip(*(samples[name] for samples in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def ratios(samples: Samples, rival: str, baseline: str, what: int) -> Interval:
    """Return rival over baseline, round by round; `what` is 0 for wall time and 1 for CPU time."""
    pairs = zip(samples[rival], samples[baseline], strict=True)
    return median_interval([mine[what] / its[what] for mine, its in pairs])


def median_s(samples: Samples, rival: str) -> float:
    """Return the median wall seconds of a sample."""
    return statistics.median(wall for wall, _ in samples[rival])


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median and its 95 % interval from order statistics, which assumes nothing about the noise.

    The k-th smallest of n values lies above the true median as seldom as a fair coin shows heads fewer than k times.
    """
    ordered = sorted(values)
    n = len(ordered)
    below, cut = 0.0, 0
    while (below := below + math.comb(n, cut) / 2**n) <= 0.025:
        cut += 1
    cut -= 1
    return Interval(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut])


@dataclass(frozen=True)
class Target:
    """A figure that must not be above a limit."""

    what: str
    figure: float
    limit: float

    def __str__(self) -> str:
        verdict = "met" if self.figure <= self.limit else "MISSED"
        return f"  {self.what}: {self.figure:.3f}, to be at most {self.limit}: {verdict}"


def report(title: str, samples: Samples, steps: int, baseline: str, targets: Sequence[Target]) -> dict[str, Any]:
    """Print a comparison of rivals with the baseline, and return it."""
    rounds = len(samples[baseline])
    print(f"\n{title}: {rounds} rounds of {steps} steps; ratios to {baseline!r}, with 95 % intervals")
    print(f"  {'':<26}{'ms a step':>9}   {'time':<22}   {'CPU time':<22}")
    figures: dict[str, Any] = {}
    for name in samples:
        wall, cpu = (ratios(samples, name, baseline, what) for what in (0, 1))
        step_ms = median_s(samples, name) / steps * 1e3
        print(f"  {name:<26}{step_ms:9.3f}   {wall}   {cpu}")
        figures[name] = {"ms": step_ms, "time": asdict(wall), "cpu": asdict(cpu)}
    print(*targets, sep="\n", flush=True)
    return {"baseline": baseline, "rivals": figures, "targets": [asdict(target) for target in targets]}


def run_processes(work: Callable[..., Any], num_processes: int, *arguments: Any, timeout_s: float) -> list[Any]:
    """Return `work(rank, *arguments)` of fresh gloo processes, in the order of ranks; results travel as JSON.

    Raises an exception of a process, and TimeoutError after `timeout_s`; no process outlives the call.
    """
    with TemporaryDirectory() as folder:
        enter = partial(_enter, work, num_processes, folder, arguments)
        context = start_processes(_Call(enter), nprocs=num_processes, join=False, daemon=True, start_method="spawn")
        deadline = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{work.__name__}{arguments} took longer than {timeout_s:g} s")
        finally:
            for process in context.processes:
                process.kill()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_processes)]


def status_bytes(field: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class _Call:
    """A function with a name, as torch's process launcher needs it."""

    run: Callable[[int], None]
    __name__ = "benchmark"

    def __call__(self, rank: int) -> None:
        self.run(rank)


def _enter(work: Callable[..., Any], world: int, folder: str, arguments: tuple[Any, ...], rank: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), rank=rank, world_size=world)
    Path(folder, f"{rank}.json").write_text(json.dumps(work(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()
