"""Add up gradients as early as the data allows: right after the stage's last backward.

    … Bwd(s, 7)  SendGrad(s, 7)  AllReduceBucket(s, 0) …

Where ep shares out experts, a stage's last bucket holds those of the rank, and is summed over dp and cp alone.

The gradient for the previous stage goes first where it follows at once: another rank waits for it. The gradients of
tied weights, and of twins, are added up before that, at the end of the programs, in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quintsched.instructions import ENDS_BACKWARD, AllReduceBucket, Compute, Instruction, SendGrad, SyncTied
from quintsched.plan import Plan, Program


def sync_tied(plan: Plan) -> Plan:
    """End every program with a `SyncTied` for each tie of its stages."""
    ties, ranks_of = plan.layout.ties, plan.layout.ranks_of
    return replace(
        plan,
        programs=tuple(
            (*program, *(SyncTied(tie.params, tie.stages) for tie in ties if rank in ranks_of(tie.stages)))
            for rank, program in enumerate(plan.programs)
        ),
    )


def reduce_buckets(plan: Plan) -> Plan:
    """Add an `AllReduceBucket` per stage and bucket over the axes of its replicas; none where there are no replicas."""
    if not plan.layout.reductions:
        return plan
    return replace(plan, programs=tuple(tuple(_with_reductions(rank, p, plan)) for rank, p in enumerate(plan.programs)))


def _with_reductions(rank: int, program: Program, plan: Plan) -> Iterator[Instruction]:
    complete = _completions(rank, program, plan)
    due: list[AllReduceBucket] = []
    for index, instruction in enumerate(program):
        if not isinstance(instruction, SendGrad):
            yield from due
            due = []
        yield instruction
        for stage in complete.get(index, ()):
            due += [AllReduceBucket(stage, bucket, axes) for bucket, axes in plan.layout.reductions]
    yield from due


def _completions(rank: int, program: Program, plan: Plan) -> dict[int, list[int]]:
    """Return which stages' gradients are complete after which instruction."""
    last: dict[int, int] = {}
    for index, i in enumerate(program):
        if isinstance(i, ENDS_BACKWARD) and isinstance(i, Compute):
            last[i.stage] = index
        elif isinstance(i, SyncTied):
            last |= {stage: index for stage in i.stages if plan.layout.rank_of(stage) == rank}
    found: dict[int, list[int]] = {}
    for stage, index in sorted(last.items()):
        found.setdefault(index, []).append(stage)
    return found
