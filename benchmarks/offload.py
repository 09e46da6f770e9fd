"""Activations that go to the host's memory, or to other ranks: are time and peak as planned?

    python benchmarks/offload.py [--only time|memory|lent] [--schedules 1f1b,zbv] [--json]

    time     four ranks as threads; every computation sleeps for 20 ms, the activations of a microbatch go to the host,
             and come back, in 15, messages take 5: a step within 5 % of its simulation
    memory   two ranks train a small GPT: the peak of bytes that autograd saves, within 1 % of its simulation (3 % where
             microbatches come in slices, whose activations differ)

    lent     the same four ranks, whose activations go to ranks with memory to spare: a step within 5 % of its
             simulation; of schedules whose ranks hold unlike amounts

    all stay     F0 F1 F2 F3 …
    half         F0 F1 F2 F3 …     the rest goes to the host while others compute,
                 └─0┘└─1┘          and is back for its backward

The cap is half of each schedule's peak, or the least that works; of lent activations, the least. Exit code 1 where a
figure is beyond its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from fidelity import MICROBATCHES, SLICES, Sleeps, chosen, compile_for, run_sleeps
from fidelity_rows import Row, report
from sleeper import Sleeper, SleepFunction
from torch import Tensor, nn

import quintsched as qs
from quintsched.passes import place_loans
from quintsched.passes.place_offloads import least_cap
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

COPY_MS = 15.0
BYTES = 4
"""Bytes of a number in float32."""


def compile_capped(schedule: qs.Schedule, pp: int, costs: qs.Costs) -> qs.Plan:
    """Return a plan that holds half of its uncapped peak, or as little as it can."""
    free = compile_for(schedule, pp, costs)
    cap = max(least_cap(free, costs), max(free.simulate(costs).peak_activations) / 2)
    slices = free.schedule.slices
    return qs.compile(schedule, mesh=free.mesh, microbatches=MICROBATCHES, slices=slices, costs=costs, offload=cap)


# Time.


class SavingSleeper(Sleeper):
    """A sleeper whose autograd graph saves its output."""

    def forward(self, given: Tensor, past: object = None) -> Tensor:
        output: Tensor = _SavingSleep.apply(given, self.weight, self._pace)  # type: ignore[no-untyped-call]
        return output


class _SavingSleep(SleepFunction):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: nn.Parameter, pace: Any) -> Tensor:
        output = SleepFunction.forward(ctx, given, weight, pace)
        ctx.save_for_backward(output)
        return output


@dataclass(frozen=True)
class OffloadedSleeps(Sleeps):
    """Sleeps whose activations are copied to the host; the input half of a backward leaves next to nothing."""

    copy_ms: float = COPY_MS
    block: ClassVar[type[Sleeper]] = SavingSleeper

    @property
    def slices(self) -> int:
        return min(self.schedule.max_slices, SLICES)

    @property
    def host_bandwidth(self) -> float:
        return BYTES * SLICES / self.slices / (self.copy_ms / 1e3)

    def costs(self) -> qs.Costs:
        per_ms = 1 / (self.copy_ms * self.schedule.min_chunks * self.slices)
        return super().costs().model_copy(update={"activation_after_input": 0.0, "host_bandwidth": per_ms})

    def plan(self) -> qs.Plan:
        return compile_capped(self.schedule, self.pp, self.costs())


@dataclass(frozen=True)
class LentSleeps(Sleeps):
    """Sleeps whose activations are lent; a loan is one message, over a wire whose latency is all of its time."""

    block: ClassVar[type[Sleeper]] = SavingSleeper

    def costs(self) -> qs.Costs:
        stages = len(self.schedule.placed(self.pp, None))
        return self._costs(p2p=self.wire_ms, activation_after_input=0.0, activation_message=(1.0,) * stages)

    def plan(self) -> qs.Plan:
        costs = self.costs()
        free = compile_for(self.schedule, self.pp, costs)
        cap, slices = place_loans.least_cap(free, costs), free.schedule.slices
        return qs.compile(
            self.schedule, mesh=free.mesh, microbatches=MICROBATCHES, slices=slices, costs=costs, lend=cap
        )


# Memory.

LENGTH, CLASSES, DEPTH = 16, 32, 6


@dataclass(frozen=True)
class Peak:
    """Peaks of one schedule on its first rank: without a cap, and simulated and measured under one."""

    schedule: str
    uncapped: float
    simulated: float
    measured: float
    limit: float
    columns: ClassVar[str] = f"{'all':>12}{'simulated':>12}{'measured':>12}{'ratio':>9}{'of all':>9}"

    @property
    def is_within(self) -> bool:
        return abs(self.measured / self.simulated - 1) <= self.limit

    def __str__(self) -> str:
        figures = "".join(f"{value:12.0f}" for value in (self.uncapped, self.simulated, self.measured))
        ratio = f"{self.measured / self.simulated:9.4f}{self.measured / self.uncapped:9.2f}"
        return f"  {self.schedule:<18}{figures}{ratio}{'' if self.is_within else '  MISSED'}"


def train_counting(plan: qs.Plan) -> tuple[list[int], qs.Costs]:
    """Return the peaks of the ranks in the second step, in bytes, and the costs of single microbatches."""
    torch.manual_seed(0)
    inputs, targets = torch.randint(0, CLASSES, (2, 2 * MICROBATCHES, LENGTH))
    spec = DataSpec(input_shape=(LENGTH,), num_classes=CLASSES)

    def run(transport: Transport) -> tuple[int, qs.Costs]:
        blocks = gpt(spec, GPTOptions(hidden=32, depth=DEPTH))
        engine = Engine(plan, blocks, cross_entropy_sum, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport)
        engine.step(inputs, targets)
        _, counted = engine.step_counting_saved(inputs, targets)
        return counted.peak, engine.saved_costs(counted)

    found = run_local(plan.mesh.size, run)
    return [peak for peak, _ in found], found[0][1]


def run_memory(schedule: qs.Schedule) -> Peak:
    """Measure the bytes of single microbatches, cap the plan by that, and measure it."""
    free, costs = train_counting(compile_for(schedule, 2))
    plan = compile_capped(schedule, 2, costs)
    measured, _ = train_counting(plan)
    simulated = plan.simulate(costs).peak_activations
    limit = 0.03 if plan.schedule.slices > 1 else 0.01
    found = [Peak(schedule.name, *peaks, limit) for peaks in zip(free, simulated, measured, strict=True)]
    return max(found, key=lambda peak: abs(peak.measured / peak.simulated - 1))


def main() -> int:
    names = [schedule.name for schedule in qs.all_schedules() if schedule.mode == "train"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["time", "memory", "lent"], help="run one part")
    parser.add_argument("--schedules", default=",".join(names), help="these only, separated by commas")
    parser.add_argument("--json", action="store_true", help="rows as JSON to standard output, tables to standard error")
    options = parser.parse_args()
    if not {*options.schedules.split(",")} <= {*names}:
        parser.error(f"schedules are {', '.join(names)}")
    schedules = chosen(options.schedules.split(","))
    torch.set_num_threads(1)
    found: dict[str, list[Row] | list[Peak]] = {}
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        if options.only in (None, "time"):
            title = f"sleeps of 20 ms, copies of {COPY_MS:g} ms, messages of 5 ms, 4 ranks in process: ms a step"
            found["time"] = report(title, (run_sleeps(OffloadedSleeps(one), limit=0.05) for one in schedules))
        if options.only in (None, "lent"):
            title = "sleeps of 20 ms, lent activations, messages of 5 ms, 4 ranks in process: ms a step"
            lending = (one for one in map(LentSleeps, schedules) if one.plan().layout.loans)
            found["lent"] = report(title, (run_sleeps(one, limit=0.05) for one in lending))
        if options.only in (None, "memory"):
            title = "a small GPT on 2 ranks, the rank farthest from its simulation: peak of saved bytes"
            found["memory"] = report(title, map(run_memory, schedules), Peak.columns)
    if options.json:
        print(json.dumps({part: [asdict(row) for row in rows] for part, rows in found.items()}, indent=1))
    return 0 if all(row.is_within for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
