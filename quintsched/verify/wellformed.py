"""Well-formedness: every index in a plan refers to something that exists, as all other checks assume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintsched.errors import counted, printable
from quintsched.ir import instruction_set as ins
from quintsched.ir.dataflow_analysis import peer_of
from quintsched.ir.instruction_columns import ABSENT, Columns, Flags, Ints
from quintsched.ir.layout import TWINS, Layout
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import MAX_BLOCKS, MAX_TIED, MAX_ZERO_EVERY, Mode, PlanData, listed
from quintsched.ir.zero_setting import Zero
from quintsched.verify.microbatch_routes import loss_faults, piece_faults, skip_faults
from quintsched.verify.planned_collectives import communication_faults
from quintsched.verify.recomputed_stages import recompute_faults, recomputed_microbatch_faults

MOST_FINDING_LETTERS = 2000
"""Maximum number of characters of a message: its lists may be as long as a file."""


@dataclass(frozen=True)
class Malformation:
    """Malformation, such as an index out of range, on `rank` at `index` of its program (None: in the plan's head)."""

    message: str
    rank: int | None = None
    index: int | None = None


def malformations(plan: PlanData) -> tuple[Malformation, ...]:
    """Return all malformations of a plan: sizes, routes, and the fields of each instruction. Plans cache it."""
    return plan.remember("malformations", lambda: tuple(find_malformations(plan)))


def find_malformations(plan: PlanData) -> Iterator[Malformation]:
    """Yield the malformations one by one."""
    head = list(_head_faults(plan))
    if head:
        yield from (Malformation(printable(fault, MOST_FINDING_LETTERS)) for fault in head)
        return
    columns = plan.columns
    for row in np.flatnonzero(~_plainly_right(plan)).tolist():
        rank, index = columns.place(row)
        instruction = columns.instruction(row)
        fault = _instruction_fault(instruction, plan, rank)
        if fault:
            yield Malformation(f"rank {rank} instruction {index}, {instruction}: {fault}", rank, index)


def _plainly_right(plan: PlanData) -> Flags:
    """Mask of rows that need no closer check: their indices are plainly valid on their rank (vectorized fast path)."""
    (columns, origin), layout = plan.columns.apart, plan.layout
    fine = np.zeros(len(columns), np.bool_)
    holders = np.array(plan.stage_to_pp)
    for kind in ins.ALL:
        rows = columns.rows_where(kind)
        looked_at = issubclass(kind, _OF_UNIT | ins.OnBucket | ins.GatherParams | ins.FreeParams)
        if not len(rows) or not looked_at or plan.zero.stage not in ZERO_STAGES.get(kind, (plan.zero.stage,)):
            continue
        stage = columns.stage[rows]
        known = (stage >= 0) & (stage < len(holders))
        rows = rows[known]
        if not issubclass(kind, ins.LOANS):
            rows = rows[holders[columns.stage[rows]] == columns.rank[rows]]
        if issubclass(kind, _OF_UNIT):
            rows = _visited(rows, layout, columns)
        if issubclass(kind, (ins.HostCopy, *ins.LOANS)):
            rows = rows[~layout.recomputing[columns.stage[rows], columns.unit[rows]]]
        if issubclass(kind, ins.Message):
            rows = rows[_names_its_peer(rows, kind, layout, columns)]
        if issubclass(kind, ins.OnBucket):
            rows = rows[_names_a_bucket(rows, kind, layout, columns)]
        fine[rows] = True
    found = np.ones(len(plan.columns), np.bool_)
    found[origin[~fine]] = False
    overlaps = plan.columns.rows_where(ins.Overlap)
    found[overlaps] &= (plan.columns.column("forward") != plan.columns.column("backward"))[overlaps] & layout.trains
    return found


def _visited(rows: Ints, layout: Layout, columns: Columns) -> Ints:
    """Return the rows whose microbatch visits their stage."""
    unit = columns.unit[rows]
    rows = rows[(unit >= 0) & (unit < layout.num_microbatches)]
    found: Ints = rows[layout.visits_all[columns.stage[rows], columns.unit[rows]]]
    return found


def _names_its_peer(rows: Ints, kind: type[ins.Message], layout: Layout, columns: Columns) -> Flags:
    """Mask of messages whose peer is the rank of the neighbouring stage; others always get the slow check."""
    if kind in (*ins.SKIP_MESSAGES, *ins.LOANS):
        return np.zeros(len(rows), np.bool_)
    other_stage = layout.all_after if issubclass(kind, ins.SendAct | ins.RecvGrad) else layout.all_before
    other, peer = other_stage(columns.stage[rows], columns.unit[rows]), columns.peer[rows]
    found: Flags = (other >= 0) & (peer == np.array(layout.stage_to_pp)[other]) & (peer != columns.rank[rows])
    return found


def _names_a_bucket(rows: Ints, kind: type[ins.OnBucket], layout: Layout, columns: Columns) -> Flags:
    """Mask of collectives with a bucket of their stage, the axes of its replicas and one of its reductions."""
    bucket = columns.column("bucket")[rows]
    place = {axes: number for number, axes in enumerate(columns.table)}
    wanted = np.array([place.get(axes, ABSENT) if axes else ABSENT for axes in layout.buckets.values()])
    known = (bucket >= 0) & (bucket < len(wanted))
    right = wanted[np.where(known, bucket, 0)] == columns.column("axes")[rows]
    found: Flags = known & right
    if issubclass(kind, ins.ReduceScatterBucket):
        part = columns.column("part")[rows]
        found &= (part >= 0) & (part < layout.num_reductions[columns.stage[rows]])
    return found


def _head_faults(plan: PlanData) -> Iterator[str]:
    pp, stages = plan.mesh.pp, range(len(plan.stage_to_pp))
    if len(plan.programs) != pp:
        yield f"there are {len(plan.programs)} programs, but the mesh {plan.mesh} has {counted(pp, 'pipeline rank')}"
    sizes = {"microbatches": plan.schedule.microbatches, "slices": plan.schedule.slices}
    for name, size in {**sizes, "buckets_per_stage": plan.buckets_per_stage}.items():
        if size < 1:
            yield f"{name} is {size}; there is at least one"
    for stage, rank in enumerate(plan.stage_to_pp):
        if not 0 <= rank < pp:
            yield f"stage {stage} is placed on pipeline rank {rank}, which is not among 0 to {pp - 1}"
    for number, route in enumerate(plan.routes):
        if not route.stages:
            yield f"route {number} visits no stage"
        if sorted(set(route.stages)) != sorted(route.stages) or not set(route.stages) <= set(stages):
            yield f"route {number} must visit stages among 0 to {len(stages) - 1}, each once; it is {route.stages}"
    unvisited = sorted({*stages}.difference(*(route.stages for route in plan.routes)))
    if unvisited:
        yield f"no route visits stage {unvisited[0]}"
    routed = sorted(microbatch for route in plan.routes for microbatch in route.microbatches)
    if routed != list(range(plan.schedule.num_units)):
        yield f"the routes must hold each of the {counted(plan.schedule.num_units, 'microbatch')} once"
    yield from piece_faults(plan)
    if plan.recompute:
        yield from recompute_faults(plan.recompute, len(plan.stage_to_pp), plan.mode)
    if plan.recompute_microbatches and len(plan.recompute) in (0, len(stages)):
        chosen = plan.recompute_microbatches
        yield from recomputed_microbatch_faults(chosen, plan.recompute, plan.routes, max(plan.schedule.slices, 1))
    yield from tied_faults(plan)
    yield from skip_faults(plan)
    yield from loss_faults(plan)
    yield from communication_faults(plan)
    yield from zero_faults(plan.zero, plan.mesh, plan.mode)
    if plan.blocks_per_stage:
        yield from blocks_faults(plan.blocks_per_stage, plan)


def blocks_faults(blocks: tuple[int, ...], plan: PlanData) -> Iterator[str]:
    """Yield the faults of a plan's number of blocks per stage."""
    num_stages = len(plan.stage_to_pp)
    if len(blocks) != num_stages:
        yield f"blocks are given for {counted(len(blocks), 'stage')} ({listed(blocks)}), but there are {num_stages}"
        return
    for count in blocks:
        if type(count) is not int or not 0 <= count <= MAX_BLOCKS:
            yield f"a stage of {count!r} blocks; give a whole number from 0 to {MAX_BLOCKS} for each stage"
            return
    for first in {route.stages[0] for route in plan.routes if route.stages}.intersection(range(num_stages)):
        if not blocks[first]:
            yield f"stage {first} has no blocks, but it is a first stage, which takes the inputs; give it at least one"
    holders: dict[int, int] = {}
    for stage, piece in enumerate(plan.stage_to_part or ()):
        twin = holders.setdefault(piece, stage)
        if stage < num_stages and blocks[stage] != blocks[twin]:
            yield (
                f"stages {twin} and {stage} hold the same piece of the model, but have {blocks[twin]} and "
                f"{counted(blocks[stage], 'block')}; give both the same number"
            )


def tied_faults(plan: PlanData) -> Iterator[str]:
    """Yield the faults of a plan's named tied weights."""
    if plan.tied and plan.stage_to_part is not None:
        yield "tied: stages have twins here, which hold all of their weights together; name no tied weights besides"
    if len(plan.tied) > MAX_TIED:
        yield f"tied: {len(plan.tied)} names are more than {MAX_TIED}"
    visited = [{*route.stages} for route in plan.routes]
    for name, stages in plan.tied.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200 or name == TWINS:
            yield f"tied: {name!r} is not a name of 1 to 200 printable letters other than {TWINS!r}"
        if len(stages) < 2 or any(type(stage) is not int for stage in stages) or sorted({*stages}) != [*stages]:
            yield f"tied: {name!r} must name at least two stages, each once and in rising order; it names {stages}"
        elif not any(stages_of_route.issuperset(stages) for stages_of_route in visited):
            yield (
                f"tied: no route visits all stages of {name!r}, {stages}; the plan has "
                f"{counted(len(plan.stage_to_pp), 'stage')}"
            )


def zero_faults(zero: Zero, mesh: Mesh, mode: Mode) -> Iterator[str]:
    """Yield the faults of a plan's ZeRO setting."""
    if type(zero.stage) is not int or not 0 <= zero.stage <= 3:
        yield (
            f"zero is {zero.stage!r}; give 0 (nothing is shared out), 1 (the optimizer's state), 2 (gradients too) or "
            "3 (weights too)"
        )
        return
    if type(zero.every) is not int or not 1 <= zero.every <= MAX_ZERO_EVERY:
        yield f"zero_every is {zero.every!r}; give a whole number of microbatches from 1 to {MAX_ZERO_EVERY}"
    elif zero.every > 1 and not (zero.shards_gradients and mode == "train"):
        yield f"zero_every is {zero.every}, but only ZeRO-2 and 3 reduce gradients before the last microbatch"
    if zero.stage and not mesh.replica_axes:
        yield f"ZeRO-{zero.stage} shares out over replicas; the mesh {mesh} has none (no dp, cp or ep above 1)"
    if zero.stage in (1, 2) and mode != "train":
        yield f"ZeRO-{zero.stage}: the plan only computes forward; there are no gradients and no optimizer to share out"


def _instruction_fault(instruction: ins.Instruction, plan: PlanData, rank: int) -> str | None:
    for kind, fault_of in _FAULTS:
        if isinstance(instruction, kind):
            return fault_of(instruction, plan, rank)
    return None


def _stage_fault(stage: int, plan: PlanData, rank: int) -> str | None:
    if not 0 <= stage < len(plan.stage_to_pp):
        return f"stage {stage} is out of range: the plan has the stages 0 to {len(plan.stage_to_pp) - 1}"
    if plan.stage_to_pp[stage] != rank:
        return f"stage {stage} is on rank {plan.stage_to_pp[stage]}, not on rank {rank}"
    return None


_OF_UNIT = ins.Compute | ins.Message | ins.HostCopy


def _unit_fault(i: ins.Compute | ins.Message | ins.HostCopy, plan: PlanData, rank: int) -> str | None:
    if fault := _stage_fault(i.stage, plan, rank):
        return fault
    if not 0 <= i.microbatch < plan.schedule.num_units:
        return f"microbatch {i.microbatch} is out of range: there are {plan.schedule.num_units}"
    if not plan.layout.visits(i.stage, i.microbatch):
        return f"the route of microbatch {i.microbatch} does not visit stage {i.stage}"
    return None


def _host_copy_fault(i: ins.HostCopy, plan: PlanData, rank: int) -> str | None:
    if fault := _unit_fault(i, plan, rank):
        return fault
    if plan.layout.recomputes(i.stage, i.microbatch):
        return f"stage {i.stage} is recomputed: it drops its activations, and has none to move to the host's memory"
    return None


def _overlap_fault(i: ins.Overlap, plan: PlanData, rank: int) -> str | None:
    if plan.mode != "train":
        return "there is no backward in a plan that only computes forward"
    if i.forward == i.backward:
        return "its two sides are one microbatch of one stage; the backward needs what the forward makes"
    faults = (_unit_fault(side, plan, rank) for side in i.sides if isinstance(side, ins.Compute))
    return next(filter(None, faults), None)


def _loan_fault(i: ins.Message, plan: PlanData, rank: int) -> str | None:
    """Return the fault of a message of lent activations, which go from their stage's rank to one other, and back."""
    lends = isinstance(i, ins.LendAct | ins.ReclaimAct)
    own = plan.stage_to_pp[i.stage] if 0 <= i.stage < len(plan.stage_to_pp) else rank
    if fault := _unit_fault(i, plan, rank if lends else own):
        return fault
    if plan.layout.recomputes(i.stage, i.microbatch):
        return f"stage {i.stage} is recomputed: it drops its activations, and has none to lend"
    holder = plan.layout.lent_to.get((i.stage, i.microbatch))
    if holder is None:
        return f"rank {own} lends no activations of stage {i.stage}, microbatch {i.microbatch}"
    if holder == own or not 0 <= holder < plan.mesh.pp:
        return f"rank {own} lends to rank {holder}; name another pipeline rank, from 0 to {plan.mesh.pp - 1}"
    if (rank, i.peer) != ((own, holder) if lends else (holder, own)):
        return f"rank {own} lends these activations to rank {holder}, and no rank {rank} exchanges them with {i.peer}"
    return None


def _message_fault(i: ins.Message, plan: PlanData, rank: int) -> str | None:
    if isinstance(i, ins.LOANS):
        return _loan_fault(i, plan, rank)
    if fault := _unit_fault(i, plan, rank):
        return fault
    expected = peer_of(i, plan.layout)
    if i.peer == rank:
        return f"its peer is rank {rank} itself; stages on one rank hand over in place, without a message"
    if isinstance(i, ins.SKIP_MESSAGES):
        return _skip_fault(i, plan, expected)
    if expected < 0:
        return "the route begins or ends here: there is nobody to exchange this with"
    if i.peer != expected:
        return f"peer {i.peer} does not hold the neighbouring stage; rank {expected} does"
    return None


def _skip_fault(i: ins.SkipMessage, plan: PlanData, expected: int) -> str | None:
    if i.skip not in plan.skips:
        return f"the plan has no skip {i.skip!r}"
    if expected < 0:
        return f"stage {i.stage} exchanges nothing of the skip {i.skip!r} with another rank there"
    if i.peer != expected:
        return f"stage {i.stage} does not exchange the skip {i.skip!r} with rank {i.peer}, but with rank {expected}"
    return None


Bucketed = ins.AllReduceBucket | ins.ReduceScatterBucket | ins.AllGatherBucket


def _bucket_fault(i: Bucketed, plan: PlanData, rank: int) -> str | None:
    if fault := _stage_fault(i.stage, plan, rank) or _zero_fault(i, plan):
        return fault
    buckets = plan.layout.buckets
    if i.bucket not in buckets:
        return f"bucket {i.bucket} is out of range: a stage has {len(buckets)}"
    if i.axes != buckets[i.bucket] or not i.axes:
        return f"the axes must be those of the replicas, {buckets[i.bucket] or 'of which there are none'}"
    if isinstance(i, ins.ReduceScatterBucket) and not 0 <= i.part < plan.layout.num_reductions[i.stage]:
        return f"part {i.part} is out of range: the gradients of the stage have {plan.layout.num_reductions[i.stage]}"
    return None


def _params_fault(i: ins.GatherParams | ins.FreeParams, plan: PlanData, rank: int) -> str | None:
    return _stage_fault(i.stage, plan, rank) or _zero_fault(i, plan)


ZERO_STAGES: dict[type[ins.Instruction], tuple[int, ...]] = {
    ins.AllReduceBucket: (0,),
    ins.ReduceScatterBucket: (1, 2, 3),
    ins.AllGatherBucket: (1, 2),
    ins.GatherParams: (3,),
    ins.FreeParams: (3,),
}
"""ZeRO stages of the plans in which an instruction may occur."""


def _zero_fault(i: ins.Instruction, plan: PlanData) -> str | None:
    if plan.zero.stage in ZERO_STAGES[type(i)]:
        return None
    shared = (
        "nothing" if plan.zero.stage == 0 else ", ".join(("optimizer state", "gradients", "weights")[: plan.zero.stage])
    )
    return f"it has no place in a plan of ZeRO stage {plan.zero.stage}, where replicas share out {shared}"


def _step_fault(i: ins.OptStep, plan: PlanData, rank: int) -> str | None:
    if len({*i.stages}) != len(i.stages):
        return "a stage is named twice; it has one optimizer step"
    faults = (_stage_fault(stage, plan, rank) for stage in i.stages)
    return next(filter(None, faults), None)


def _tied_fault(i: ins.SyncTied, plan: PlanData, rank: int) -> str | None:
    ties = [tie for tie in plan.layout.ties if tie.params == i.params]
    if not ties:
        return f"the plan ties no weight {i.params!r}"
    if i.stages not in [tie.stages for tie in ties]:
        return f"it must name all stages that hold {i.params!r}: {' or '.join(str(tie.stages) for tie in ties)}"
    if rank not in plan.layout.ranks_of(i.stages):
        return f"rank {rank} holds none of these stages"
    return None


_FAULTS: tuple[tuple[type[ins.Instruction], Callable[[Any, PlanData, int], str | None]], ...] = (
    (ins.Compute, _unit_fault),
    (ins.Overlap, _overlap_fault),
    (ins.Message, _message_fault),
    (ins.HostCopy, _host_copy_fault),
    (ins.AllReduceBucket, _bucket_fault),
    (ins.ReduceScatterBucket, _bucket_fault),
    (ins.AllGatherBucket, _bucket_fault),
    (ins.GatherParams, _params_fault),
    (ins.FreeParams, _params_fault),
    (ins.SyncTied, _tied_fault),
    (ins.OptStep, _step_fault),
)
