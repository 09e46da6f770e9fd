"""Plans with faults.

A mutant is a small plan with changes of its programs: instructions swapped, moved, dropped or doubled, messages sent to
another rank, microbatches, stages and buckets renumbered, forwards and backwards put side by side (`overlap_edits`).
`any_mutant` changes its head and its spelled-out collectives as well (`head_edits`), in 1 to 4 places. Some do no harm.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import quintsched as qs
from quintsched.ir.instructions import (
    SKIP_MESSAGES,
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    Compute,
    FetchAct,
    FreeParams,
    Fwd,
    GatherParams,
    HostCopy,
    Instruction,
    Message,
    OffloadAct,
    OptStep,
    Overlap,
    ReduceScatterBucket,
    SyncTied,
)
from quintsched.passes.place_offloads import least_cap
from quintsched.plan import Plan
from quintsched.schedules import Schedule
from tests.planner.verify.head_edits import edit_head
from tests.planner.verify.overlap_edits import changed_pair

SHAPES = (
    ("pp=1", 1),
    ("pp=2", 2),
    ("pp=2", 3),
    ("pp=2", 4),
    ("dp=2,pp=2", 4),
    ("dp=2,pp=3", 3),
    ("dp=2,ep=2,pp=2", 2),
    ("pp=3", 4),
    ("pp=4", 4),
)
PAIRED = (
    ("dualpipe-v", "pp=1", 3),
    ("dualpipe-v", "pp=2", 4),
    ("dualpipe-v", "dp=2,pp=2", 3),
    ("dualpipe-v", "pp=3", 6),
    ("dualpipe", "pp=2", 4),
    ("dualpipe", "dp=2,ep=2,pp=2", 4),
    ("dualpipe", "pp=4", 8),
    ("interleaved-1f1b", "pp=1", 3),
    ("interleaved-1f1b", "pp=2", 4),
    ("interleaved-1f1b", "dp=2,pp=2", 4),
    ("interleaved-1f1b", "pp=3", 3),
)
MOST_INSTRUCTIONS = 120


BUILT_IN = [schedule for schedule in qs.all_schedules() if schedule.built_in]
"""Not those that other tests have registered."""


@cache
def small_plans() -> tuple[Plan, ...]:
    """Every schedule there is at those small shapes that it takes; with slices where it takes them.

    Each plainly, with every second stage recomputed and a weight tied between the first stage and the last, with skips
    past stages, with a loss on a stage before the last, and with optimizer state, gradients or weights shared out over
    its replicas.
    """
    found = []
    for schedule in BUILT_IN:
        for mesh, microbatches in SHAPES:
            for slices in {1, min(2, schedule.max_slices)}:
                shape = {"mesh": mesh, "microbatches": microbatches, "slices": slices, "buckets_per_stage": 2}
                try:
                    plan = qs.compile(schedule, **shape)
                except qs.UsageError:
                    continue
                last = len(plan.stage_to_pp) - 1
                recompute = [(stage + 1) % 2 for stage in range(last + 1)]
                tied = {"embedding": (0, last)} if last and not schedule.bidirectional else {}
                plans = [plan]
                if schedule.mode == "train":
                    plans.append(qs.compile(schedule, **shape, recompute=recompute, tied=tied))
                if last and not schedule.bidirectional:
                    plans.append(qs.compile(schedule, **shape, skip=skips_between(last)))
                    plans.append(qs.compile(schedule, **shape, losses=[last // 2, last], skip={"far": (0, last)}))
                if "2" in mesh.split("pp")[0]:
                    plans += zero_plans(schedule, shape, recompute, tied)
                found += [plan for plan in plans if plan.num_instructions <= MOST_INSTRUCTIONS]
    return tuple(found)


def skips_between(last: int) -> dict[str, tuple[int, ...]]:
    """A skip from the first stage to all others, and one that goes past some, if there are such."""
    return {"all": tuple(range(last + 1)), "far": (0, last)} if last < 3 else {"all": (0, 1, 2, last), "far": (1, last)}


def zero_plans(schedule: Schedule, shape: dict, recompute: list[int], tied: dict) -> list[Plan]:
    """ZeRO 1 to 3 of a schedule at a shape; with weights shared out, recomputed and tied too."""
    if schedule.mode == "forward":
        return [qs.compile(schedule, **shape, zero=3)]
    kinds = [{"zero": 1}, {"zero": 2}, {"zero": 2, "zero_every": 2}, {"zero": 3}, {"zero": 3, "zero_every": 3}]
    kinds.append({"zero": 3, "recompute": recompute, "tied": tied})
    return [qs.compile(schedule, **shape, **kind) for kind in kinds]


@cache
def spelled_plans() -> tuple[Plan, ...]:
    """Plans whose buckets are exchanged in messages: by rings, by trees, by whatever is fastest; with ZeRO 1 to 3."""
    found = []
    for name in ("1f1b", "zb-h1", "dualpipe", "interleaved-1f1b"):
        for mesh in ("dp=2,pp=2", "dp=3,pp=2", "dp=2,ep=2,pp=2"):
            kinds = [{"communication": means} for means in ("ring", "tree", "auto")]
            kinds += [{"communication": "ring", "zero": zero} for zero in (1, 2, 3)]
            kinds += [{"communication": "auto", "zero": 1}]
            if name == "1f1b":
                kinds.append({"communication": "ring", "zero": 1, "recompute": 1, "tied": {"embedding": (0, 1)}})
            found += [
                qs.compile(name, mesh=mesh, microbatches=2 if name != "dualpipe" else 4, **kind) for kind in kinds
            ]
    found += [qs.compile("1f1b", mesh="dp=4", microbatches=1, communication=means) for means in ("ring", "tree")]
    return tuple(plan for plan in found if plan.num_instructions <= MOST_INSTRUCTIONS)


@cache
def offloaded_plans() -> tuple[Plan, ...]:
    """Plans of every schedule that move as many activations to the host as they can: recomputed in part, and ZeRO-3."""
    found, light = [], qs.Costs(activation_after_input=0.25)
    for schedule in BUILT_IN:
        if schedule.mode != "train":
            continue
        for shape in ({"mesh": "pp=2"}, {"mesh": "dp=2,pp=2", "zero": 3}, {"mesh": "pp=2", "recompute": [0, 1]}):
            shape |= {"microbatches": 4, "slices": min(2, schedule.max_slices)}
            stages = len(qs.compile(schedule, **{**shape, "recompute": 0}).stage_to_pp)
            shape |= {"recompute": [stage % 2 for stage in range(stages)]} if "recompute" in shape else {}
            plan = qs.compile(schedule, **shape)
            found.append(qs.compile(schedule, **shape, offload=least_cap(plan, light), costs=light))
    return tuple(plan for plan in found if plan.num_instructions <= MOST_INSTRUCTIONS)


@cache
def overlapping_plans() -> tuple[Plan, ...]:
    """Every schedule that has pairs, with them: plainly, recomputed and tied in part, with skips, with ZeRO 1 to 3."""
    found = []
    for schedule, mesh, microbatches in PAIRED:
        shape = {"mesh": mesh, "microbatches": microbatches, "buckets_per_stage": 2, "overlap": True}
        plan = qs.compile(schedule, **shape)
        last = len(plan.stage_to_pp) - 1
        recompute = [(stage + 1) % 2 for stage in range(last + 1)]
        tied = {} if len(plan.routes) > 1 else {"embedding": (0, last)}
        found += [plan, qs.compile(schedule, **shape, recompute=recompute, tied=tied)]
        if len(plan.routes) == 1 and last:
            found.append(qs.compile(schedule, **shape, skip=skips_between(last), losses=[last // 2, last]))
        if "dp" in mesh:
            kinds = ({"zero": 1}, {"zero": 2, "zero_every": 2}, {"zero": 3}, {"zero": 3, "recompute": recompute})
            found += [qs.compile(schedule, **shape, **kind) for kind in kinds]
    uneven = (("interleaved-1f1b", "pp=2", [0, 0, 1, 0]), ("dualpipe-v", "dp=2,pp=2", [0, 1, 1, 1, 0]))
    found += [
        qs.compile(schedule, mesh=mesh, microbatches=4, stage_to_pp=where, overlap=True)
        for schedule, mesh, where in uneven
    ]
    return tuple(plan for plan in found if plan.num_instructions <= MOST_INSTRUCTIONS)


@cache
def uneven_plans() -> tuple[Plan, ...]:
    """Plans whose stages are runs of the schedule's, or missing, with as many blocks as they say."""
    shapes: list[tuple[str, str, int, list[int], dict]] = [
        ("1f1b", "dp=2,pp=2", 3, [0, 0, 1], {"stages": [1, 2, 0], "zero": 1}),
        ("zb-h1", "pp=2", 3, [0, 1, 1, 1], {"stages": [2, 0, 1, 1], "tied": {"embedding": (0, 3)}}),
        ("interleaved-1f1b", "pp=2", 4, [0, 0, 1, 0], {}),
        ("zbv", "pp=2", 3, [0, 1, 1, 1, 0], {"recompute": [0, 1, 0, 1, 0]}),
        ("dualpipe", "pp=2", 4, [0, 0, 1, 1, 1, 0], {"stages": [1, 3, 0, 1, 3, 0]}),
        ("v-min", "pp=3", 3, [0, 1, 2, 1, 0], {"stages": [1, 1, 1, 1, 0]}),
    ]
    return tuple(
        qs.compile(schedule, mesh=mesh, microbatches=microbatches, stage_to_pp=where, **more)
        for schedule, mesh, microbatches, where, more in shapes
    )


def mutant(plan: Plan, random: Random) -> Plan:
    """Return the plan with one or two changes of its programs."""
    for _ in range(random.randint(1, 2)):
        plan = edit_program(plan, random)
    return plan


def any_mutant(plan: Plan, random: Random) -> Plan:
    """Return the plan with 1 to 4 changes of any kind."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        plan = (edit_head if random.random() < 0.3 else edit_program)(plan, random)
    return plan


def edit_program(plan: Plan, random: Random) -> Plan:
    """Return the plan with one change of one program."""
    rank = random.randrange(len(plan.programs))
    program = list(plan.programs[rank])
    return with_program(plan, rank, _changed(program, plan, random)) if program else plan


def with_program(plan: Plan, rank: int, program: list[Instruction]) -> Plan:
    programs = list(plan.programs)
    programs[rank] = tuple(program)
    return replace(plan, programs=tuple(programs))


def _changed(program: list[Instruction], plan: Plan, random: Random) -> list[Instruction]:
    index, other = random.randrange(len(program)), random.randrange(len(program))
    i = program[index]
    kinds = ["swap", "neighbours", "drop", "duplicate", "move"]
    kinds += ["retarget"] if isinstance(i, Message) else []
    kinds += ["renumber", "restage"] if isinstance(i, Compute | Message | HostCopy) else []
    kinds += ["other way"] if isinstance(i, HostCopy) else []
    kinds += ["host"] if isinstance(i, Compute) and plan.schedule.options.get("offload") else []
    kinds += ["reskip"] if isinstance(i, SKIP_MESSAGES) else []
    kinds += ["rebucket"] if isinstance(i, AllReduceBucket | ReduceScatterBucket | AllGatherBucket) else []
    kinds += ["repart"] if isinstance(i, ReduceScatterBucket) else []
    kinds += ["restage"] if isinstance(i, GatherParams | FreeParams) else []
    kinds += ["gather"] if plan.zero.stage == 3 else []
    kinds += ["reduce otherwise"] if isinstance(i, AllReduceBucket | ReduceScatterBucket) else []
    kinds += ["stages"] if isinstance(i, OptStep) else []
    kinds += ["retie"] if isinstance(i, SyncTied) else []
    kinds += ["halves"] if isinstance(i, Bwd | BwdInput | BwdWeight) else []
    kinds += ["pair"] if isinstance(i, Fwd | Bwd | Overlap) else []
    ranks, units, stages = len(plan.programs), plan.schedule.num_units, len(plan.stage_to_pp)
    match random.choice(kinds):
        case "swap":
            program[index], program[other] = program[other], i
        case "neighbours":
            program[index : index + 2] = reversed(program[index : index + 2])
        case "drop":
            del program[index]
        case "duplicate":
            program.insert(other, i)
        case "move":
            program.insert(other, program.pop(index))
        case "retarget":
            program[index] = replace(i, peer=random.randint(0, ranks))
        case "renumber":
            program[index] = replace(i, microbatch=random.randint(0, units))
        case "restage":
            program[index] = replace(i, stage=random.randint(0, stages))
        case "reskip":
            program[index] = replace(i, skip=random.choice(["all", "far", "none"]))
        case "other way":
            program[index] = (FetchAct if isinstance(i, OffloadAct) else OffloadAct)(i.stage, i.microbatch)
        case "host":
            for place, kind in zip(sorted((index, other)), random.sample([OffloadAct, FetchAct], 2), strict=True):
                program.insert(place + 1, kind(i.stage, i.microbatch))
        case "rebucket":
            program[index] = replace(i, bucket=random.randint(0, plan.buckets_per_stage + 1))
        case "repart":
            program[index] = replace(i, part=random.randint(0, i.part + 1))
        case "gather":
            kind = random.choice([GatherParams, FreeParams])
            program.insert(index, kind(random.randrange(stages)))
        case "reduce otherwise":
            whole = AllReduceBucket(i.stage, i.bucket, i.axes)
            parts = ReduceScatterBucket(i.stage, i.bucket, i.axes, 0)
            program[index] = parts if isinstance(i, AllReduceBucket) else whole
        case "stages":
            program[index] = replace(i, stages=tuple(random.choices(range(stages + 1), k=random.randint(0, 3))))
        case "retie":
            program[index] = replace(i, params="head") if random.random() < 0.5 else replace(i, stages=i.stages[1:])
        case "pair":
            return changed_pair(program, index, plan, random)
        case "halves":
            kind = random.choice([Bwd, BwdInput, BwdWeight])
            program[index] = kind(i.stage, i.microbatch)
    return program
