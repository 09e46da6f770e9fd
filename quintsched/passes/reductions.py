"""Reduce gradients as early as the data allows: right after the stage's last backward.

    … Bwd(s, 7)  SendGrad(s, 7)  AllReduceBucket(s, 0) …

The gradient for the previous stage goes first where it follows at once: another rank waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quintsched.instructions import AllReduceBucket, Bwd, Instruction, SendGrad
from quintsched.plan import Plan, Program


def reduce_buckets(plan: Plan) -> Plan:
    """Add an `AllReduceBucket` per stage and bucket over the replica axes; none where there are no replicas."""
    axes = plan.mesh.replica_axes
    if not axes:
        return plan
    return replace(plan, programs=tuple(tuple(_with_reductions(p, plan, axes)) for p in plan.programs))


def _with_reductions(program: Program, plan: Plan, axes: tuple[str, ...]) -> Iterator[Instruction]:
    last = {i.stage: index for index, i in enumerate(program) if isinstance(i, Bwd)}
    due: list[AllReduceBucket] = []
    for index, instruction in enumerate(program):
        if not isinstance(instruction, SendGrad):
            yield from due
            due = []
        yield instruction
        if isinstance(instruction, Bwd) and last[instruction.stage] == index:
            due += [AllReduceBucket(instruction.stage, b, axes) for b in range(plan.buckets_per_stage)]
    yield from due
