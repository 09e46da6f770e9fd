"""Add up gradients as early as the data allows: right after the stage's last backward.

    … Bwd(s, 7)  SendGrad(s, 7)  AllReduceBucket(s, 0) …

Where optimizer state is shared out over replicas (ZeRO), a `ReduceScatterBucket` stands there instead; where gradients
are, one after every few backwards, so that full gradients never stand for longer:

    … Bwd(s, 0)  SendGrad(s, 0)  ReduceScatterBucket(s, 0, part 0)  … Bwd(s, 1)  ReduceScatterBucket(s, 0, part 1) …

Where ep shares out experts, a stage's last bucket holds those of the rank, and is summed over dp and cp alone.

The gradient for the previous stage goes first where it follows at once: another rank waits for it. The gradients of
tied weights, and of twins, are added up before that, at the end of the programs, in one order on all ranks: so the
gradients of stages that hold such weights are reduced once, after that, and full ones stand until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quintsched.ir.instructions import (
    ENDS_BACKWARD,
    AllReduceBucket,
    Compute,
    FreeParams,
    Instruction,
    ReduceScatterBucket,
    SendGrad,
    SyncTied,
)
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
    """Sum each stage's buckets over the axes of its replicas; nothing where there are no replicas."""
    if not plan.layout.reductions:
        return plan
    return replace(plan, programs=tuple(tuple(_with_reductions(rank, p, plan)) for rank, p in enumerate(plan.programs)))


def _with_reductions(rank: int, program: Program, plan: Plan) -> Iterator[Instruction]:
    complete = _completions(rank, program, plan)
    due: list[Instruction] = []
    for index, instruction in enumerate(program):
        if not isinstance(instruction, SendGrad | FreeParams):
            yield from due
            due = []
        yield instruction
        for stage, part in complete.get(index, ()):
            due += [_reduction(stage, bucket, axes, part, plan) for bucket, axes in plan.layout.reductions]
    yield from due


def _reduction(stage: int, bucket: int, axes: tuple[str, ...], part: int, plan: Plan) -> Instruction:
    if plan.zero.shares_optimizer:
        return ReduceScatterBucket(stage, bucket, axes, part)
    return AllReduceBucket(stage, bucket, axes)


def _completions(rank: int, program: Program, plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return which parts of which stages' gradients, (stage, part), are complete after which instruction."""
    layout = plan.layout
    last: dict[tuple[int, int], int] = {}
    for index, i in enumerate(program):
        if isinstance(i, ENDS_BACKWARD) and isinstance(i, Compute):
            last[i.stage, layout.part_number(i.stage, i.microbatch)] = index
        elif isinstance(i, SyncTied):
            last |= {(stage, 0): index for stage in i.stages if layout.rank_of(stage) == rank}
    found: dict[int, list[tuple[int, int]]] = {}
    for part, index in sorted(last.items()):
        found.setdefault(index, []).append(part)
    return found
