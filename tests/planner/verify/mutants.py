"""Plans with faults: the `small_plans` with changes of their programs: instructions swapped, moved, dropped, doubled,
messages sent to another rank, microbatches, stages and buckets renumbered, the sums over several groups of ranks issued
in other orders, forwards and backwards put side by side:

    F1 → B0      join     [F1&B0]      split     B0 F1        swap     [F0&B1]        change     [F1&B3]

A join takes the messages along that would else stand on the wrong side of it, or leaves them. `any_mutant` changes a
plan's head and its spelled-out collectives as well (`head_edits`), in 1 to 4 places. Some do no harm.
"""

from dataclasses import replace
from random import Random

from quintsched.ir import instruction_set as ops
from quintsched.plan import Plan
from tests.planner.verify.head_edits import edit_head


def mutant(plan: Plan, random: Random) -> Plan:
    """Return the plan with one or two changes of its programs."""
    for _ in range(random.randint(1, 2)):
        plan = edit_program(plan, random)
    return plan


def any_mutant(plan: Plan, random: Random) -> Plan:
    """Return the plan with 1 to 4 changes of any kind."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        plan = (edit_head if random.random() < 0.3 else edit_program)(plan, random)
    return reordered(plan, random) if plan.tied and random.random() < 0.2 else plan


def reordered(plan: Plan, random: Random) -> Plan:
    """Return the plan with its collectives over pipeline ranks in another order: in one on all ranks, or on some."""
    ranks, salt, in_one_order = range(len(plan.programs)), random.random(), random.random() < 0.4
    for rank in ranks if in_one_order else random.sample(ranks, random.randint(1, len(ranks))):
        program = list(plan.programs[rank])
        places = [index for index, i in enumerate(program) if isinstance(i, ops.SyncTied | ops.ShareMetrics)]
        drawn = {program[at]: Random(f"{salt} {program[at]} {in_one_order or rank}").random() for at in places}
        for index, i in zip(places, sorted((program[at] for at in places), key=drawn.__getitem__), strict=True):
            program[index] = i
        plan = with_program(plan, rank, program)
    return plan


def edit_program(plan: Plan, random: Random) -> Plan:
    """Return the plan with one change of one program."""
    rank = random.randrange(len(plan.programs))
    program = list(plan.programs[rank])
    return with_program(plan, rank, _changed(program, plan, random)) if program else plan


def with_program(plan: Plan, rank: int, program: list[ops.Instruction]) -> Plan:
    programs = list(plan.programs)
    programs[rank] = tuple(program)
    return replace(plan, programs=tuple(programs))


def _kinds_of_change(i: ops.Instruction, plan: Plan) -> list[str]:
    kinds = ["swap", "neighbours", "drop", "duplicate", "move"]
    kinds += ["retarget"] if isinstance(i, ops.Message) else []
    kinds += ["renumber", "restage"] if isinstance(i, ops.Compute | ops.Message | ops.HostCopy) else []
    kinds += ["other way"] if isinstance(i, ops.HostCopy) else []
    kinds += ["host"] if isinstance(i, ops.Compute) and plan.schedule.options.get("offload") else []
    kinds += ["other loan"] if isinstance(i, ops.LOANS) else []
    kinds += ["reskip"] if isinstance(i, ops.SKIP_MESSAGES) else []
    kinds += ["rebucket"] if isinstance(i, ops.AllReduceBucket | ops.ReduceScatterBucket | ops.AllGatherBucket) else []
    kinds += ["repart"] if isinstance(i, ops.ReduceScatterBucket) else []
    kinds += ["restage"] if isinstance(i, ops.GatherParams | ops.FreeParams) else []
    kinds += ["gather"] if plan.zero.stage == 3 else []
    kinds += ["reduce otherwise"] if isinstance(i, ops.AllReduceBucket | ops.ReduceScatterBucket) else []
    kinds += ["stages"] if isinstance(i, ops.OptStep) else []
    kinds += ["retie"] if isinstance(i, ops.SyncTied) else []
    kinds += ["halves"] if isinstance(i, ops.Bwd | ops.BwdInput | ops.BwdWeight) else []
    kinds += ["pair"] if isinstance(i, ops.Fwd | ops.Bwd | ops.Overlap) else []
    return kinds


def _changed(program: list[ops.Instruction], plan: Plan, random: Random) -> list[ops.Instruction]:
    index, other = random.randrange(len(program)), random.randrange(len(program))
    i = program[index]
    ranks, units, stages = len(plan.programs), plan.schedule.num_units, len(plan.stage_to_pp)
    match random.choice(_kinds_of_change(i, plan)):
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
            program[index] = (ops.FetchAct if isinstance(i, ops.OffloadAct) else ops.OffloadAct)(i.stage, i.microbatch)
        case "other loan":
            program[index] = random.choice(ops.LOANS)(i.stage, i.microbatch, i.peer)
        case "host":
            for place, kind in zip(
                sorted((index, other)), random.sample([ops.OffloadAct, ops.FetchAct], 2), strict=True
            ):
                program.insert(place + 1, kind(i.stage, i.microbatch))
        case "rebucket":
            program[index] = replace(i, bucket=random.randint(0, plan.buckets_per_stage + 1))
        case "repart":
            program[index] = replace(i, part=random.randint(0, i.part + 1))
        case "gather":
            kind = random.choice([ops.GatherParams, ops.FreeParams])
            program.insert(index, kind(random.randrange(stages)))
        case "reduce otherwise":
            whole = ops.AllReduceBucket(i.stage, i.bucket, i.axes)
            parts = ops.ReduceScatterBucket(i.stage, i.bucket, i.axes, 0)
            program[index] = parts if isinstance(i, ops.AllReduceBucket) else whole
        case "stages":
            program[index] = replace(i, stages=tuple(random.choices(range(stages + 1), k=random.randint(0, 3))))
        case "retie":
            program[index] = replace(i, params="head") if random.random() < 0.5 else replace(i, stages=i.stages[1:])
        case "pair":
            return _changed_pair(program, index, plan, random)
        case "halves":
            kind = random.choice([ops.Bwd, ops.BwdInput, ops.BwdWeight])
            program[index] = kind(i.stage, i.microbatch)
    return program


def _changed_pair(program: list[ops.Instruction], index: int, plan: Plan, random: Random) -> list[ops.Instruction]:
    """Return a program with another pair than the one at `index`, or with a pair of the computation there."""
    i = program[index]
    if not isinstance(i, ops.Overlap):
        return _joined(program, index, random)
    side, most = random.choice(["forward", "backward"]), (len(plan.stage_to_pp), plan.schedule.num_units)
    numbers, which = [*getattr(i, side)], random.randrange(2)
    numbers[which] = random.randint(0, most[which])
    others: list[list[ops.Instruction]] = [
        random.sample(i.sides, 2),
        [ops.Overlap(i.backward, i.forward)],
        [random.choice(i.sides)],
        [replace(i, **{side: tuple(numbers)})],
    ]
    return [*program[:index], *random.choice(others), *program[index + 1 :]]


def _joined(program: list[ops.Instruction], index: int, random: Random) -> list[ops.Instruction]:
    """Put a forward and the next backward, or a backward and the next forward, side by side where one of them is."""
    i = program[index]
    wanted = ops.Bwd if isinstance(i, ops.Fwd) else ops.Fwd
    later = next((k for k in range(index + 1, len(program)) if isinstance(program[k], wanted)), None)
    if later is None:
        return program
    pair = [i, program[later]]
    forward, backward = sorted((type(side) is ops.Bwd, side.stage, side.microbatch) for side in pair)
    together = ops.Overlap(forward[1:], backward[1:])
    between, behind = program[index + 1 : later], program[later + 1 :]
    sends = [k for k in between if isinstance(k, ops.Message) and _of(k, i)]
    rest = [k for k in between if k not in sends]
    places = [[together, *between], [*between, together], [*rest, together, *sends]]
    return [*program[:index], *random.choice(places), *behind]


def _of(message: ops.Message, i: ops.Instruction) -> bool:
    """Whether a message takes away what a computation makes."""
    given = (message.stage, message.microbatch) == (i.stage, i.microbatch)
    return given and isinstance(message, ops.SendAct) == isinstance(i, ops.Fwd) and "Send" in message.op
