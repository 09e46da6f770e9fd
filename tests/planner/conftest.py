"""Plans to try things on."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, Fwd, Instruction, Message, RecvAct, RecvGrad, SendAct, SendGrad
from quintsched.plan import Plan


def without_care(plan: Plan) -> Plan:
    """Return the plan with each receive just before its use and each send just after: this often deadlocks."""
    return replace(plan, programs=tuple(_carelessly(plan, rank) for rank in range(len(plan.programs))))


def _carelessly(plan: Plan, rank: int) -> tuple[Instruction, ...]:
    at, last = plan.stage_to_pp, len(plan.stage_to_pp) - 1
    program: list[Instruction] = []
    for i in plan.programs[rank]:
        if isinstance(i, Message):
            continue
        after: list[Instruction] = []
        for side in (side for side in i.sides if isinstance(side, Fwd | Bwd)):
            s, m = side.stage, side.microbatch
            below = s > 0 and at[s - 1] != rank
            above = s < last and at[s + 1] != rank
            if isinstance(side, Fwd):
                program += [RecvAct(s, m, at[s - 1])] if below else []
                after += [SendAct(s, m, at[s + 1])] if above else []
            else:
                program += [RecvGrad(s, m, at[s + 1])] if above else []
                after += [SendGrad(s, m, at[s - 1])] if below else []
        program += [i, *after]
    return tuple(program)


@pytest.fixture
def careless():
    return without_care


@pytest.fixture(scope="session")
def plan() -> Plan:
    return qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=4)
