"""Overlap of forwards and backwards: does it hide the exchanges inside stages, and at what cost?

    python benchmarks/overlap.py [--only hidden|gloo|cost] [--json]

    hidden   four ranks as threads (pp=2, ep=2) whose blocks sleep and swap rows over a wire of 5 ms, twice per pass:
             share of the exchange exposed by 1F1B that DualPipeV with overlap hides. At least 80 %, and each step
             is within 5 % of its simulation
    gloo     two processes that really compute, with experts: the same plan with overlap, against its simulation under
             the costs of a trace: within 5 %
    cost     the same experts in two threads, without a wire: the cost of overlap where there is nothing to hide, as a
             ratio of times in turn: at most 1.01

    1F1B             F▒F▒ B▒B▒ F▒F▒ B▒B▒           ▒ an exposed exchange
    with overlap     FBFBFBFB FBFBFBFB

Exposed is the time by which exchanges of 5 ms lengthen a step, relative to exchanges that take no time. The exit code
is 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fidelity import Spans, only_step, timed, took_ms
from paired import merge, ratios, run_processes, sample_warm
from sleeper import sleep, urgently
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, connect, run_local
from quintsched.runtime.comm.autograd_collectives import all_to_all
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.parallel.expert.moe import MoE
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.trace.measured_trace import Trace

WIRE_S = 0.005
FORWARD_S, BACKWARD_S = 0.020, 0.040
"""Sleep of a rank's blocks for a microbatch, without exchanges."""

STEPS = 5
"""Number of steps; during the first two the order of turns is settled."""


@dataclass(frozen=True)
class Figure:
    """A measured figure, and its limit."""

    name: str
    value: float
    limit: str
    is_met: bool

    def __str__(self) -> str:
        return f"  {self.name:<52}{self.value:9.3f}   {self.limit}{'' if self.is_met else '  MISSED'}"


# Sleeps.


class SleepingMixture(MoE):
    """Sleeps, swaps rows with the other ranks of ep, sleeps, swaps them back: the timing of experts alone."""

    def __init__(self) -> None:
        super().__init__(2, 2, lambda: nn.Linear(2, 2), top_k=1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Return the tokens unchanged: (rows, 2) to (rows, 2)."""
        weight = next(iter(self.experts.values())).weight
        for _ in range(2):
            tokens = _Sleep.apply(tokens, weight, self.router.weight)  # type: ignore[no-untyped-call]
            tokens = tokens if tokens.is_meta else all_to_all(tokens, self.group, 0)
        return tokens, None


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, expert: Tensor, router: Tensor) -> Tensor:
        ctx.shapes = expert.shape, router.shape
        if not tokens.is_meta:
            sleep(FORWARD_S / 4)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        sleep(BACKWARD_S / 4)
        return gradient.clone(), *(gradient.new_zeros(shape) for shape in ctx.shapes)


def run_sleeps(plan: qs.Plan, folder: str, transport: Transport) -> Spans:
    """Train on one rank, two blocks to a rank; the last steps are traced."""
    engine = Engine(
        plan,
        [SleepingMixture] * 4,
        lambda output, _: output.sum(),
        partial(torch.optim.SGD, lr=0.0),
        block_costs=[1.0] * 4,
        trace_steps=range(2, STEPS),
        transport=transport,
    )
    batch = torch.zeros(2 * plan.schedule.microbatches, 2)
    spans = [timed(engine, partial(engine.step, batch, batch)) for _ in range(STEPS)][2:]
    engine.save_trace(Path(folder))
    return spans


def run_with_wire(plan: qs.Plan, exchange_s: float) -> tuple[float, qs.Costs]:
    """Return the best time of a step after the first ones, in ms, and the costs of the trace."""
    with TemporaryDirectory() as folder, urgently():
        spans = run_local(4, partial(run_sleeps, plan, folder), wire_s=WIRE_S, collective_s=exchange_s)
        return min(took_ms(spans)), Trace.load(Path(folder), plan).costs()


def predicted_ms(plan: qs.Plan, alone: qs.Costs, itself: qs.Costs) -> float:
    """Return the simulated time of a step, from the costs of a run without overlap whose exchanges take no time.

    The exchange time of a stage's blocks is known; the time of the step's end is that of the run itself.
    """
    blocks = 4 / len(plan.stage_to_pp)
    exchange = (2e3 * WIRE_S * blocks,) * len(plan.stage_to_pp)
    return plan.simulate(alone.model_copy(update={"exchange": exchange, "clip": itself.clip})).makespan


def measure_hidden(microbatches: int = 16) -> list[Figure]:
    """Compare DualPipeV with overlap to 1F1B, and all steps with their simulations."""
    shapes = {"1f1b": ("1f1b", False), "dualpipe-v": ("dualpipe-v", False), "overlap": ("dualpipe-v", True)}
    plans = {
        name: qs.compile(schedule, mesh="pp=2,ep=2", microbatches=microbatches, overlap=overlap)
        for name, (schedule, overlap) in shapes.items()
    }
    quick = {name: run_with_wire(plan, 0.0) for name, plan in plans.items()}
    slow = {name: run_with_wire(plan, WIRE_S) for name, plan in plans.items()}
    exposed = {name: slow[name][0] - quick[name][0] for name in plans}
    figures = [Figure(f"{name}: exchange exposed, ms", exposed[name], "", True) for name in plans]
    hidden = 1 - exposed["overlap"] / exposed["1f1b"]
    figures.append(Figure("dualpipe-v with overlap hides of what 1f1b exposes", hidden, ">= 0.8", hidden >= 0.8))
    for name, plan in plans.items():
        ratio = slow[name][0] / predicted_ms(plan, quick[shapes[name][0]][1], slow[name][1])
        figures.append(Figure(f"{name}: measured / simulated", ratio, "within 5 %", abs(ratio - 1) <= 0.05))
    return figures


# Experts.

LENGTH, MICROBATCHES, SAMPLES = 64, 8, 2


def experts(hidden: int) -> Sequence[Any]:
    """Return the blocks of a transformer with four experts in each of two layers."""
    return moe_gpt(
        DataSpec(input_shape=(LENGTH,), num_classes=256), MoEGPTOptions(hidden=hidden, depth=2, heads=4, experts=4)
    )


def make_engine(transport: Transport, *, overlap: bool, hidden: int, trace: Sequence[int] | None = None) -> Engine:
    """Return an engine of DualPipeV on two ranks that hold two experts each."""
    plan = qs.compile("dualpipe-v", mesh="ep=2", microbatches=MICROBATCHES, overlap=overlap)
    return Engine(
        plan,
        experts(hidden),
        cross_entropy_sum,
        partial(torch.optim.SGD, lr=1e-3),
        trace_steps=trace,
        transport=transport,
    )


def batch_of(engine: Engine) -> tuple[Tensor, Tensor]:
    """Return this rank's samples."""
    generator = torch.Generator().manual_seed(engine.replica)
    ids = torch.randint(256, (MICROBATCHES * SAMPLES, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def run_gloo(rank: int, folder: str, rounds: int) -> Spans:
    """Train with overlap: of two steps one is traced and one is timed."""
    transport = connect("gloo", timeout_s=60)
    engine = make_engine(transport, overlap=True, hidden=256, trace=range(4, 4 + 2 * rounds, 2))
    batch = batch_of(engine)
    spans = [timed(engine, partial(engine.step, *batch)) for _ in range(4 + 2 * rounds)]
    engine.save_trace(Path(folder))
    return spans[5::2]


def measure_gloo(rounds: int = 9) -> list[Figure]:
    """Compare each timed step with the simulation under the costs of the step before; the median round counts."""
    plan = qs.compile("dualpipe-v", mesh="ep=2", microbatches=MICROBATCHES, overlap=True)
    with TemporaryDirectory() as folder:
        measured = took_ms(run_processes(run_gloo, 2, folder, rounds, timeout_s=600))
        trace = Trace.load(Path(folder), plan)
        found = sorted(
            took / plan.simulate(only_step(trace, number).costs()).makespan for number, took in enumerate(measured)
        )
    ratio = found[len(found) // 2]
    return [Figure("gloo, experts, overlap: measured / simulated", ratio, "within 5 %", abs(ratio - 1) <= 0.05)]


def run_both(rounds: int, transport: Transport) -> Any:
    """Train with and without overlap in turn."""
    engines = {name: make_engine(transport, overlap=name == "overlap", hidden=128) for name in ("plain", "overlap")}
    again = make_engine(transport, overlap=False, hidden=128)
    rivals = {name: partial(engine.step, *batch_of(engine)) for name, engine in (engines | {"again": again}).items()}
    return sample_warm(rivals, rounds, 1, engines["plain"].everyone.barrier, 3)


def measure_cost(rounds: int = 60) -> list[Figure]:
    """Compare a step with overlap to one without, where no wire takes time."""
    samples = merge(run_local(2, partial(run_both, rounds)))
    figures = []
    for name, limit in (("again", ""), ("overlap", "<= 1.01")):
        found = ratios(samples, name, "plain", 0)
        is_met = not limit or found.low <= 1.01
        figures.append(Figure(f"no wire, {name} / plain, {found}", found.median, limit, is_met))
    return figures


MEASUREMENTS = {"hidden": measure_hidden, "gloo": measure_gloo, "cost": measure_cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASUREMENTS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    figures = [
        figure for name, measure in MEASUREMENTS.items() if arguments.only in (None, name) for figure in measure()
    ]
    print(json.dumps([asdict(figure) for figure in figures]) if arguments.json else "\n".join(map(str, figures)))
    sys.exit(not all(figure.is_met for figure in figures))


if __name__ == "__main__":
    main()
