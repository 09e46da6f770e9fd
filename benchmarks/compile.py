"""How long compiling, proving and simulating large plans takes, beside torch.distributed.pipelining in the same run.

    python benchmarks/compile.py            about two minutes on one core; torch is left out where it is missing

"compile" builds the plan and proves it in full; torch's "build" makes the schedule and lowers it to sends and
receives, without a proof. Its simulator gets the order without UNSHARD and RESHARD, at which it fails.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import quintsched as qs
from quintsched.ir.instructions import Bwd, BwdWeight

CASES = [("interleaved-1f1b", "ScheduleInterleaved1F1B", 4), ("interleaved-zb", "ScheduleInterleavedZeroBubble", 2)]
PP, MICROBATCHES = 64, 512


def timed(what: str, run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = run()
    taken = time.process_time() - began
    print(f"  {what:<44}{taken:8.2f} s", flush=True)
    return result, taken


def ours(name: str, chunks: int) -> tuple[qs.Plan, float, float]:
    """Return the plan, and the seconds of compiling with the full proof and of simulating."""
    plan, compiling = timed("compile and full check", lambda: compiled(name, PP, MICROBATCHES, chunks))
    _, simulating = timed("simulate", plan.simulate)
    return plan, compiling, simulating


def compiled(name: str, pp: int, microbatches: int, chunks: int, **axes: int) -> qs.Plan:
    return qs.compile(name, mesh=qs.Mesh(pp=pp, **axes), microbatches=microbatches, chunks=chunks)


def torchs(class_name: str, chunks: int) -> tuple[float, float]:
    """Return the seconds that torch takes to build and lower the same schedule, and to simulate it."""
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            num_stages=PP * chunks, group_size=PP, group_rank=0, stage_index=chunk * PP, is_first=chunk == 0,
            is_last=False, has_backward=True, stage_index_to_group_rank=None, submod=None,
        )
        for chunk in range(chunks)
    ]  # fmt: skip
    made, building = timed("torch: build and lower", lambda: getattr(schedules, class_name)(stages, MICROBATCHES))
    kinds = {schedules._ComputationType.UNSHARD, schedules._ComputationType.RESHARD}
    kinds |= {kind for kind in schedules._ComputationType if kind.name == "REDUCE_GRAD"}
    order = {
        rank: [action for action in actions if action.computation_type not in kinds]
        for rank, actions in made.pipeline_order_with_comms.items()
    }
    mapping = made.stage_index_to_group_rank
    _, simulating = timed(
        "torch: simulate", lambda: schedules._simulate_comms_compute(order, lambda s: mapping[s], PP * chunks)
    )
    return building, simulating


def compare() -> None:
    has_torch = importlib.util.find_spec("torch") is not None
    for name, class_name, chunks in CASES:
        print(f"{name}, pp={PP}, {chunks} chunks, {MICROBATCHES} microbatches")
        plan, compiling, simulating = ours(name, chunks)
        print(f"  {plan.num_instructions} instructions; compile, check and simulate: {compiling + simulating:.2f} s")
        if has_torch:
            building, torch_simulating = torchs(class_name, chunks)
            ratio = (building + torch_simulating) / (compiling + simulating)
            print(f"  torch takes {ratio:.1f} times as long together ({building + torch_simulating:.1f} s)")


def scale() -> None:
    print("seconds per million instructions of compiling, proving and simulating")
    rates = []
    for pp, microbatches in [(8, 64), (16, 128), (32, 256), (64, 512), (64, 656)]:
        rounds = 3 if pp < 64 else 1
        began = time.process_time()
        for _ in range(rounds):
            plan = compiled("interleaved-1f1b", pp, microbatches - microbatches % pp, 4)
            plan.simulate()
        rates.append((time.process_time() - began) / rounds / plan.num_instructions * 1e6)
        print(f"  {plan.num_instructions:>9} instructions {rates[-1]:8.2f} s")
    print(f"  largest over smallest: {max(rates) / min(rates):.2f}")


def replicas() -> None:
    print("a plan for 131,072 ranks costs what its pipeline costs")
    compiled("1f1b", 32, 256, 1)
    for axes in ({}, {"dp": 512, "tp": 8}):
        timed(
            f"{32 * axes.get('dp', 1) * axes.get('tp', 1)} ranks",
            lambda axes=axes: compiled("1f1b", 32, 256, 1, **axes),
        )  # type: ignore[misc]


def files_and_faults() -> None:
    plan = compiled("interleaved-1f1b", PP, MICROBATCHES, 4)
    print("its file, and a fault in it")
    text, _ = timed("to JSON", plan.to_json)
    timed("from JSON", lambda: qs.Plan.from_json(text))
    program = list(plan.programs[40])
    last = max(i for i, instruction in enumerate(program) if isinstance(instruction, Bwd | BwdWeight))
    del program[last]
    broken = replace(plan, programs=(*plan.programs[:40], tuple(program), *plan.programs[41:]))
    verdict, _ = timed("check of the plan without one backward", broken.check)
    print("   ", verdict.explain().splitlines()[1][:100])
    middle = len(plan.programs[7]) // 2
    program = list(plan.programs[7])
    program[middle : middle + 40] = reversed(program[middle : middle + 40])
    broken = replace(plan, programs=(*plan.programs[:7], tuple(program), *plan.programs[8:]))
    verdict, _ = timed("check of the plan with 40 reversed", lambda: broken.check().explain())


if __name__ == "__main__":
    compare()
    scale()
    replicas()
    files_and_faults()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this process: {peak:.2f} GiB")
    sys.exit(0)
