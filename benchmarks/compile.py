"""Time of compiling, proving and simulating large plans, beside torch.distributed.pipelining in the same run.

    python benchmarks/compile.py            about two minutes on one core; torch is left out where it is missing
    python benchmarks/compile.py --large    ten million instructions as well

"compile" builds the plan and proves it in full; torch's "build" makes the schedule and lowers it to sends and
receives, without a proof. Its simulator gets the order without UNSHARD and RESHARD, at which it fails.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import quintsched as qs
import quintsched.compiler
import quintsched.simulation.simulator
from quintsched.instructions import Bwd, BwdWeight
from quintsched.ir.rank_programs import Programs

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


def sharded() -> None:
    print("seconds per million instructions, by what replicas shard (pp=64, 4 chunks, 512 microbatches, dp=2)")
    rates = []
    for zero in range(4):
        began = time.process_time()
        plan = qs.compile("interleaved-1f1b", mesh=qs.Mesh(dp=2, pp=PP), microbatches=MICROBATCHES, chunks=4, zero=zero)
        plan.simulate()
        rates.append((time.process_time() - began) / plan.num_instructions * 1e6)
        print(
            f"  ZeRO-{zero}{plan.num_instructions:>9} instructions {rates[-1]:8.2f} s, {rates[-1] / rates[0]:.2f} times"
        )


def wide() -> None:
    print("as many pipeline ranks as there are")
    for pp in (1000, 12_000):
        timed(f"1f1b, pp={pp}, 24 microbatches", lambda pp=pp: compiled("1f1b", pp, 24, 1).simulate())  # type: ignore[misc]


def scale() -> None:
    print("seconds per million instructions of compiling, proving and simulating")
    rates = []
    sizes = [(8, 64), (16, 128), (32, 256), (64, 512), (64, 656)]
    for pp, microbatches in [*sizes, (64, 6592)] if "--large" in sys.argv else sizes:
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
            partial(compiled, "1f1b", 32, 256, 1, **axes),
        )


def files_and_faults() -> None:
    plan = compiled("interleaved-1f1b", PP, MICROBATCHES, 4)
    print("its file, and a fault in it")
    text, _ = timed("to JSON", plan.to_json)
    timed("from JSON", lambda: qs.Plan.from_json(text))
    program = list(plan.programs[40])
    last = max(i for i, instruction in enumerate(program) if isinstance(instruction, Bwd | BwdWeight))
    del program[last]
    broken = replace(plan, programs=Programs.from_programs((*plan.programs[:40], program, *plan.programs[41:])))
    verdict, _ = timed("check of the plan without one backward", broken.check)
    print("   ", verdict.explain().splitlines()[1][:100])
    middle = len(plan.programs[7]) // 2
    program = list(plan.programs[7])
    program[middle : middle + 40] = reversed(program[middle : middle + 40])
    broken = replace(plan, programs=Programs.from_programs((*plan.programs[:7], program, *plan.programs[8:])))
    verdict, _ = timed("check of the plan with 40 reversed", lambda: broken.check().explain())


def peak_of_one() -> None:
    """Print the peak memory of a process that handles the first plan alone, imports included."""
    code = "import quintsched as qs, re\n"
    code += "qs.compile('interleaved-1f1b', mesh='pp=64', microbatches=512, chunks=4).simulate()\n"
    code += "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"peak memory of a process that compiles, proves and simulates the first plan: {done.stdout.strip()} MiB")


if __name__ == "__main__":
    compare()
    peak_of_one()
    scale()
    sharded()
    wide()
    replicas()
    files_and_faults()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of this process: {peak:.2f} GiB")
    sys.exit(0)
