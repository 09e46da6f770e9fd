"""Cost of the interpreter beside a hand-written loop and torch.distributed.pipelining, in one run.

    python benchmarks/interpreter.py [--only software|gloo|transformer|memory] [--rounds 40] [--json]

    software      one rank of a pipeline of four: in the middle, the first, the last; all communication stubbed out
    gloo          two processes, a tiny MLP: 8 and 32 microbatches, 1F1B and interleaved
    transformer   two processes, 4 layers, d=256, sequence 128, microbatch 4
    memory        two processes, 32 microbatches: resident memory of 1F1B beside GPipe, measured and planned

Ratios are paired round by round (see paired.py); handwritten.py describes the hand-written loop. All rivals start
from the same weights, and before anything is timed over gloo their losses must agree. Where messages are most of the
step, a pair of processes may favour one rival for its whole life (gloo has a thread for each process group, and its
placement by the system matters), so those rounds are spread over several pairs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from handwritten import LEARNING_RATE, Step, Task, gloo_wire, hand_written, pure_compute, torch_pipelining
from muted import MUTED, MutedTransport, done, muted_torch
from paired import Samples, Target, median_s, merge, ratios, report, run_processes, sample, status_bytes
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, connect, run_local

HAND, AGAIN, OURS, PURE = "hand-written", "hand-written again", "quintsched", "computation alone"
TORCH = {"1f1b": ("Schedule1F1B", "_PipelineScheduleRuntime"), "interleaved-1f1b": ("ScheduleInterleaved1F1B",)}
WARM_UP = 5
FEWEST_STEPS = 1_000
"""Least number of paired steps of the software alone: of these, the fastest tenth by CPU time is compared."""


@dataclass(frozen=True)
class Case:
    """One comparison: a model, a schedule, and the number of steps per sample."""

    title: str
    model: str
    schedule: str
    pp: int
    microbatches: int
    steps: int
    launches: int = 1
    """Number of pairs of fresh processes over which the rounds are spread."""
    rank: int = 1
    """Rank that is measured, where it is one alone."""
    most: float = 1.05
    """Limit of the time, relative to the hand-written loop."""
    most_us: float = 6.0
    """Limit of the microseconds above computation, each instruction."""

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved-1f1b" else 1

    def plan(self) -> qs.Plan:
        return qs.compile(self.schedule, mesh=qs.Mesh(pp=self.pp), microbatches=self.microbatches, chunks=self.chunks)

    def task(self, rank: int) -> Task:
        """Return a fresh task for `rank`; the weights are the same every time."""
        torch.manual_seed(0)
        blocks, like = MODELS[self.model](self.pp * self.chunks)
        return Task(self.plan(), rank, blocks, nn.functional.mse_loss, like)

    def batch(self, task: Task) -> tuple[Tensor | None, Tensor | None]:
        """Return inputs and targets where this rank needs them."""
        torch.manual_seed(1)
        rows = self.microbatches * task.like.shape[0]
        inputs, targets = torch.randn(2, rows, *task.like.shape[1:])
        modules = task.modules()
        return (inputs if 0 in modules else None), (targets if task.num_stages - 1 in modules else None)


def mlp(hidden: int, rows: int) -> Callable[[int], tuple[list[nn.Module], Tensor]]:
    """Return a function that builds a block per stage, and a tensor like the messages."""
    return lambda stages: (
        [nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(stages)],
        torch.zeros(rows, hidden),
    )


def transformer(_stages: int) -> tuple[list[nn.Module], Tensor]:
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)]
    return list(layers), torch.zeros(4, 128, 256)


def wide(stages: int) -> tuple[list[nn.Module], Tensor]:
    return [Wide() for _ in range(stages)], torch.zeros(1, 64)


MODELS: Mapping[str, Callable[[int], tuple[list[nn.Module], Tensor]]] = {
    "wide": wide,
    "hidden 8": mlp(8, 4),
    "tiny MLP": mlp(32, 4),
    "transformer": transformer,
}
SOFTWARE = [
    Case("one rank of four, 1F1B", "hidden 8", "1f1b", 4, 8, 20, most_us=1.2),
    Case("one rank of four, interleaved", "hidden 8", "interleaved-1f1b", 4, 8, 10, most=1.08),
    Case("first rank of four, 1F1B", "hidden 8", "1f1b", 4, 8, 20, rank=0, most=1.25),
    Case("last rank of four, 1F1B", "hidden 8", "1f1b", 4, 8, 20, rank=3, most=1.35),
]
GLOO = [
    Case(f"tiny MLP, {schedule}, m={m}", "tiny MLP", schedule, 2, m, steps, launches=4)
    for schedule, scale in (("1f1b", 1), ("interleaved-1f1b", 2))
    for m, steps in ((8, 12 // scale), (32, 4 // scale))
]
TRANSFORMER = [Case(f"transformer, {schedule}, m=4", "transformer", schedule, 2, 4, 1) for schedule in TORCH]


def our_engine(task: Task, transport: Transport) -> Step:
    """Return a step of the engine."""
    engine = Engine(
        task.plan,
        task.blocks,
        task.loss,
        lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        block_costs=[1.0] * len(task.blocks),
        transport=transport,
    )
    return lambda inputs, targets: engine.step(inputs, targets).loss


def muted_engine(case: Case, rank: int) -> Step:
    """Return a step of the engine on one rank, which has run with all ranks, in threads, before it is muted."""

    def start(real: Transport) -> tuple[Step, MutedTransport]:
        transport, task = MutedTransport(real), tasks[real.rank]
        step = our_engine(task, transport)
        for _ in range(2):
            step(*case.batch(task))
        return step, transport

    tasks = [case.task(each) for each in range(case.pp)]
    step, transport = run_local(case.pp, start)[rank]
    transport.is_muted = True
    return step


def software(case: Case, rounds: int) -> Samples:
    """Return the samples of one rank of a pipeline, without its other ranks."""
    rank = case.rank
    ours = muted_engine(case, rank)
    with muted_torch(rank, case.pp) as stop_filling:
        steps = {
            HAND: hand_written(case.task(rank), MUTED),
            AGAIN: hand_written(case.task(rank), MUTED),
            OURS: ours,
            PURE: pure_compute(case.task(rank), MUTED),
        }
        steps |= {name: torch_pipelining(name, case.task(rank), MUTED) for name in TORCH[case.schedule]}
        rivals = {name: partial(step, *case.batch(case.task(rank))) for name, step in steps.items()}
        warm_up(rivals)
        stop_filling()
        return sample(rivals, max(rounds, math.ceil(FEWEST_STEPS / case.steps)), case.steps, done)


def on_gloo(rank: int, case: Case, rounds: int) -> Samples:
    """Return the samples of one of the processes; losses are compared before anything is timed."""
    task = case.task(rank)
    steps = {HAND: hand_written(task, gloo_wire()), AGAIN: hand_written(case.task(rank), gloo_wire())}
    steps[OURS] = our_engine(case.task(rank), connect("gloo", timeout_s=60))
    steps |= {name: torch_pipelining(name, case.task(rank), gloo_wire()) for name in TORCH[case.schedule]}
    rivals = {name: partial(step, *case.batch(task)) for name, step in steps.items()}
    losses = warm_up(rivals)
    for name, loss in losses.items():
        if abs(loss - losses[HAND]) > 1e-5 * losses[HAND]:
            raise RuntimeError(f"{case.title}: after {WARM_UP} steps {name} has loss {loss}, {HAND} {losses[HAND]}")
    return sample(rivals, rounds, case.steps, dist.barrier)


def warm_up(rivals: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Run a few steps of each rival; return the last loss of each."""
    losses = {name: [step().item() for _ in range(WARM_UP)][-1] for name, step in rivals.items()}
    gc.collect()
    gc.freeze()
    return losses


def software_targets(case: Case, samples: Samples) -> list[Target]:
    instructions = len(case.plan().programs[case.rank])
    ours, hand, again, pure = (fastest_tenth_s(samples, name) for name in (OURS, HAND, AGAIN, PURE))
    above, by_hand = ((time - pure) * 1e6 / case.steps / instructions for time in (ours, hand))
    return [
        Target("CPU time of the fastest tenth against hand-written", ours / hand, case.most),
        Target("the hand-written loop against itself, distance from 1", abs(again / hand - 1), 0.03),
        Target(
            f"µs above computation, each of {instructions} instructions (by hand {by_hand:.2f})", above, case.most_us
        ),
    ]


def fastest_tenth_s(samples: Samples, name: str) -> float:
    """Return the CPU seconds of a sample that one in ten does not exceed."""
    ordered = sorted(cpu for _, cpu in samples[name])
    return ordered[len(ordered) // 10]


def gloo_targets(samples: Samples, baseline: str) -> list[Target]:
    return [
        Target("low end of the time's interval", ratios(samples, OURS, baseline, 0).low, 1.03),
        Target("CPU time", ratios(samples, OURS, baseline, 1).median, 1.05),
    ]


class Wide(nn.Module):
    """A block with little to send and much to save: (n, 64) becomes (n, 32768, 64) and (n, 64) again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(KEPT_BYTES // 4 // 64, 64))

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(given.unsqueeze(1) * self.weight).mean(1)


KEPT_BYTES = 8 * 2**20


def resident(rank: int, schedule: str) -> dict[str, float]:
    """Return the rise of this process's peak in three steps, and the plan's peak of activations, in bytes."""
    case = Case("", "wide", schedule, 2, 32, 1)
    task = case.task(rank)
    step = our_engine(task, connect("gloo", timeout_s=60))
    before = status_bytes("VmRSS")
    for _ in range(3):
        step(*case.batch(task))
    planned = task.plan.simulate().peak_activations[rank] * kept_bytes(task)
    return {"measured": status_bytes("VmHWM") - before, "planned": planned}


def kept_bytes(task: Task) -> int:
    """Return the bytes that one microbatch's forward saves for its backward, by storage, without weights."""
    module = next(iter(task.modules().values()))
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(torch.ones_like(task.like))
    kept = sum(size for address, size in found.items() if address not in weights)
    del output
    return kept


def memory() -> dict[str, Any]:
    """Print and return the resident memory of GPipe and 1F1B, on each rank."""
    # Blocks of a megabyte or more go back to the system when they are freed, so that resident means held.
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**20)):
        found = {schedule: run_processes(resident, 2, schedule, timeout_s=120) for schedule in ("gpipe", "1f1b")}
    print("\nresident memory, 32 microbatches of 8 MiB on two ranks: rise of the peak in MiB, measured (planned)")
    for rank in range(2):
        rises = [tuple(found[name][rank][what] / 2**20 for what in ("measured", "planned")) for name in found]
        (gpipe, gpipe_planned), (ours, ours_planned) = rises
        print(f"  rank {rank}: gpipe {gpipe:.0f} ({gpipe_planned:.0f}), 1f1b {ours:.0f} ({ours_planned:.0f})")
        share = (gpipe - ours) / (gpipe_planned - ours_planned)
        print(Target("fall against the planned fall, distance from 1", abs(share - 1), 0.05))
    return found


def run_parts(only: str | None, rounds: int) -> dict[str, Any]:
    """Run one part or all; print tables, and return the figures by title."""
    found: dict[str, Any] = {}
    for case in SOFTWARE if only in (None, "software") else ():
        samples = software(case, rounds)
        found[case.title] = report(case.title, samples, case.steps, HAND, software_targets(case, samples))
    for part, cases in (("gloo", GLOO), ("transformer", TRANSFORMER)):
        for case in cases if only in (None, part) else ():
            share = math.ceil(rounds / case.launches)
            launched = [merge(run_processes(on_gloo, 2, case, share, timeout_s=300)) for _ in range(case.launches)]
            samples = {name: [each for launch in launched for each in launch[name]] for name in launched[0]}
            rivals = [HAND, *(TORCH[case.schedule] if part == "transformer" else ())]
            best = min(rivals, key=partial(median_s, samples))
            found[case.title] = report(case.title, samples, case.steps, best, gloo_targets(samples, best))
    if only in (None, "memory"):
        found["memory"] = memory()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["software", "gloo", "transformer", "memory"], help="run one part")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each comparison, at least 6 (default 40)")
    parser.add_argument(
        "--json", action="store_true", help="figures as JSON to standard output, tables to standard error"
    )
    chosen = parser.parse_args()
    if chosen.rounds < 6:
        parser.error("an interval of 95 % takes at least 6 rounds")
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr if chosen.json else sys.stdout):
        found = run_parts(chosen.only, chosen.rounds)
    if chosen.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
