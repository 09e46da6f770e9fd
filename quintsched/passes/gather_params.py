"""Gather weights that replicas share out (ZeRO-3) before they are used, and drop them after.

    GatherParams(0)  Fwd(0, 0)  GatherParams(1)  Fwd(0, 1)  FreeParams(0)  Fwd(1, 0) …
    └─ first use ──▶            └─ one computation ahead ──────────────────▶

Computations of a stage that follow each other share one gathering. The next stage's weights are gathered while the last
of these runs: so they are there in time, and the weights of at most two stages stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quintsched.ir.instructions import NEEDS_WEIGHTS, Compute, FreeParams, GatherParams, Instruction
from quintsched.plan import Plan, Program


def gather_params(plan: Plan) -> Plan:
    """Add `GatherParams` before the weights of a stage are used and `FreeParams` after, where replicas hold shares."""
    if not plan.zero.shares_weights:
        return plan
    return replace(plan, programs=tuple(tuple(_with_gathers(program)) for program in plan.programs))


def _with_gathers(program: Program) -> Iterator[Instruction]:
    computations = [(index, i) for index, i in enumerate(program) if isinstance(i, Compute)]
    uses = [(place, i.stage) for place, (_, i) in enumerate(computations) if isinstance(i, NEEDS_WEIGHTS)]
    before: dict[int, list[int]] = {}
    after: dict[int, int] = {}
    for number, (place, stage) in enumerate(uses):
        if not number or uses[number - 1][1] != stage:
            before.setdefault(computations[max(place - 1, 0)][0], []).append(stage)
        if number + 1 == len(uses) or uses[number + 1][1] != stage:
            after[computations[place][0]] = stage
    for index, i in enumerate(program):
        yield from map(GatherParams, before.get(index, ()))
        yield i
        if index in after:
            yield FreeParams(after[index])
