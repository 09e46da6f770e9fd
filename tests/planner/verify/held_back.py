"""A plan whose queues are free of deadlock, but not where hosts issue each program in order."""

from __future__ import annotations

from dataclasses import replace

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, Fwd, Instruction, RecvAct, RecvGrad, SendAct, SendGrad
from quintsched.plan import Plan


def held_back() -> Plan:
    """Each rank keeps a message back behind a computation that waits, by way of the other rank, for that message."""
    plan = qs.compile("gpipe", mesh="pp=2", microbatches=2)
    # fmt: off
    computed: tuple[list[Instruction], list[Instruction]] = (
        [Fwd(0, 0), SendAct(0, 0, 1), Fwd(0, 1), RecvGrad(0, 0, 1), Bwd(0, 0),
         SendAct(0, 1, 1), RecvGrad(0, 1, 1), Bwd(0, 1)],
        [RecvAct(1, 0, 0), Fwd(1, 0), Bwd(1, 0), RecvAct(1, 1, 0), Fwd(1, 1),
         SendGrad(1, 0, 0), Bwd(1, 1), SendGrad(1, 1, 0)],
    )
    # fmt: on
    return replace(plan, programs=tuple((*own, *p[-3:]) for own, p in zip(computed, plan.programs, strict=True)))
