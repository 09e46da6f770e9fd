"""Rerun the forwards of stages that drop their activations: each just before the backward that needs them.

    … Bwd(s, 3)  Recompute(s, 4)  Bwd(s, 4) …

There the activations stand for the shortest time; and since only the backward takes the gradient of the stage's output,
the rank recomputes while that is still on its way. What the schedule has placed itself stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quintsched.ir.instructions import BEGINS_BACKWARD, Compute, Instruction, Recompute
from quintsched.plan import Plan, Program


def place_recomputes(plan: Plan) -> Plan:
    """Add the `Recompute`s that the order of computation leaves out; none where no stage is recomputed."""
    if not any(plan.recompute):
        return plan
    return replace(plan, programs=tuple(tuple(_with_recomputes(program, plan)) for program in plan.programs))


def _with_recomputes(program: Program, plan: Plan) -> Iterator[Instruction]:
    placed = {(i.stage, i.microbatch) for i in program if isinstance(i, Recompute)}
    for i in program:
        if isinstance(i, Compute) and isinstance(i, BEGINS_BACKWARD) and plan.layout.recomputes(i.stage):
            yield from () if (i.stage, i.microbatch) in placed else (Recompute(i.stage, i.microbatch),)
        yield i
