"""Changes of a plan that go beyond one program: of its head, of its spelled-out collectives, and in several places.

Some are careless, so that head and programs no longer fit each other. Some change all that belongs together, and either
do no harm (microbatches renamed everywhere, a backward cut into halves) or change what the plan means (other pieces of
the model on the stages, with the sums over twins to match).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from quintsched.collectives import Communication, spell
from quintsched.ir import instruction_set as ops
from quintsched.ir.layout import Route
from quintsched.plan import Plan
from tests.planner.collectives.mini_mutants import mini_mutant
from tests.planner.verify.small_plans import with_pieces


def edit_head(plan: Plan, random: Random) -> Plan:
    """Return the plan with one such change; the plan itself where it does not apply."""
    if plan.communication.plans and random.random() < 0.5:
        return _collective(plan, random)
    return random.choice(EDITS)(plan, random)


def _with_programs(plan: Plan, programs: Iterable[Iterable[ops.Instruction]]) -> Plan:
    return replace(plan, programs=tuple(map(tuple, programs)))


def _changed(plan: Plan, change: Callable[[ops.Instruction], Iterable[ops.Instruction]]) -> Plan:
    """Return the plan with others in the place of each instruction."""
    return _with_programs(plan, ([made for i in program for made in change(i)] for program in plan.programs))


def _pieces(plan: Plan, random: Random) -> Plan:
    """Other pieces of the model on the stages; half of the time with the sums over twins to match."""
    stages = len(plan.stage_to_pp)
    pieces = list(plan.stage_to_part or range(stages))
    match random.randrange(4):
        case 0:
            random.shuffle(pieces)
        case 1:
            pieces[random.randrange(stages)] = random.randint(-1, stages)
        case 2:
            renamed = random.sample(range(stages), stages)
            pieces = [renamed[piece] if 0 <= piece < stages else piece for piece in pieces]
        case 3:
            return replace(plan, stage_to_part=None)
    if random.random() < 0.5:
        return with_pieces(plan, tuple(pieces))
    return replace(plan, stage_to_part=tuple(pieces))


def _routes(plan: Plan, random: Random) -> Plan:
    routes = list(plan.routes)
    at = random.randrange(len(routes))
    stages, microbatches = list(routes[at].stages), list(routes[at].microbatches)
    match random.randrange(4):
        case 0:
            stages.reverse()
        case 1 if stages:
            del stages[random.randrange(len(stages))]
        case 2 if microbatches:
            moved = microbatches.pop(random.randrange(len(microbatches)))
            other = random.choice([number for number in range(len(routes)) if number != at] or [at])
            if other != at:
                routes[other] = replace(routes[other], microbatches=(*routes[other].microbatches, moved))
            else:
                routes.append(Route(tuple(stages), (moved,)))
        case _:
            random.shuffle(stages)
    routes[at] = Route(tuple(stages), tuple(microbatches))
    return replace(plan, routes=tuple(routes))


def _homes(plan: Plan, random: Random) -> Plan:
    homes = list(plan.stage_to_pp)
    homes[random.randrange(len(homes))] = random.randint(0, len(plan.programs))
    return replace(plan, stage_to_pp=tuple(homes))


def _zero(plan: Plan, random: Random) -> Plan:
    if random.random() < 0.5:
        return replace(plan, zero=replace(plan.zero, stage=random.randint(0, 4)))
    return replace(plan, zero=replace(plan.zero, every=random.randint(0, 4)))


def _recompute(plan: Plan, random: Random) -> Plan:
    """Toggle the recomputation of a stage; half of the time with what its backwards then need."""
    stages = len(plan.stage_to_pp)
    recompute = list(plan.recompute or (0,) * stages)
    stage = random.randrange(min(stages, len(recompute)))
    recompute[stage] = 1 - min(recompute[stage], 1)
    changed = replace(plan, recompute=tuple(recompute))
    if random.random() < 0.5:
        return changed

    def fitting(i: ops.Instruction) -> Iterable[ops.Instruction]:
        for side in i.sides:
            if isinstance(side, ops.Compute) and side.stage == stage:
                if isinstance(side, ops.Recompute):
                    return
                if isinstance(side, ops.Bwd | ops.BwdInput) and recompute[stage]:
                    yield ops.Recompute(stage, side.microbatch)
        yield i

    return _changed(changed, fitting)


def _without(plan: Plan, field: str, kinds: tuple[type[ops.Instruction], ...], word: str, random: Random) -> Plan:
    """Drop a name of what a plan ties or skips; half of the time with its instructions."""
    names = getattr(plan, field)
    gone = random.choice(sorted(names))
    changed = replace(plan, **{field: {name: held for name, held in names.items() if name != gone}})
    if random.random() < 0.5:
        return changed
    return _changed(changed, lambda i: [] if isinstance(i, kinds) and getattr(i, word) == gone else [i])


def _tied(plan: Plan, random: Random) -> Plan:
    """Tie a weight more, or one less; half of the time with its sum on all ranks that hold it."""
    stages = len(plan.stage_to_pp)
    if plan.tied and random.random() < 0.5:
        return _without(plan, "tied", (ops.SyncTied,), "params", random)
    held = tuple(sorted(random.choices(range(stages + 1), k=2))) if random.random() < 0.3 else (0, stages - 1)
    changed = replace(plan, tied={**plan.tied, "more": held})
    if random.random() < 0.3 or not all(0 <= stage < stages for stage in held):
        return changed
    sync, programs = ops.SyncTied("more", held), []
    for rank, program in enumerate(plan.programs):
        mine = rank in (plan.stage_to_pp[stage] for stage in held)
        ends = (k for k, i in enumerate(program) if isinstance(i, ops.Compute | ops.Message | ops.SyncTied))
        at = max(ends, default=-1) + 1
        programs.append([*program[:at], *[sync] * mine, *program[at:]])
    return _with_programs(changed, programs)


def _skips(plan: Plan, random: Random) -> Plan:
    """Another skip, or one less."""
    stages = range(len(plan.stage_to_pp))
    if plan.skips and random.random() < 0.5:
        return _without(plan, "skips", ops.SKIP_MESSAGES, "skip", random)
    name = random.choice([*plan.skips, "more"])
    ends = tuple(random.choices(range(len(stages) + 1), k=random.randint(1, 3)))
    return replace(plan, skips={**plan.skips, name: tuple(sorted({*ends})) if random.random() < 0.7 else ends})


def _losses(plan: Plan, random: Random) -> Plan:
    """Losses on other stages: programs are as good with them, but the model is another one."""
    stages = range(len(plan.stage_to_pp) + 1)
    drawn = tuple(random.choices(stages, k=random.randint(0, 2)))
    return replace(plan, losses=(*sorted({*drawn}), len(stages) - 2) if random.random() < 0.6 else drawn)


def _blocks(plan: Plan, random: Random) -> Plan:
    """Say how many blocks stages have; half of the time as many for twins."""
    stages = len(plan.stage_to_pp) + random.choice((0, 0, 0, 0, 0, -1, 1))
    blocks = [random.choice((0, 1, 1, 2, 3)) for _ in range(stages)]
    if random.random() < 0.1 and blocks:
        blocks[random.randrange(stages)] = -1
    pieces = plan.stage_to_part or ()
    if len(pieces) == stages and random.random() < 0.5:
        blocks = [blocks[pieces.index(piece)] for piece in pieces]
    return replace(plan, blocks_per_stage=tuple(blocks))


def _sizes(plan: Plan, random: Random) -> Plan:
    if random.random() < 0.5:
        return replace(plan, buckets_per_stage=random.randint(0, 3))
    name = random.choice(["microbatches", "slices"])
    changed = replace(plan.schedule, **{name: max(0, getattr(plan.schedule, name) + random.choice((-1, 1)))})
    return replace(plan, schedule=changed)


def _collective(plan: Plan, random: Random) -> Plan:
    """Change a spelled-out collective, or which ones there are."""
    communication, plans = plan.communication, dict(plan.communication.plans)
    if not plans or random.random() < 0.1:
        means = random.choice(("native", "ring", "tree", "auto"))
        return replace(plan, communication=Communication(means, plans, communication.wire))
    name = random.choice(sorted(plans))
    match random.choices(("change", "drop", "more", "label"), (8, 1, 1, 1))[0]:
        case "change":
            plans[name] = mini_mutant(plans[name], random)
        case "drop":
            del plans[name]
        case "more":
            plans["more"] = spell(random.choice(("all_reduce", "all_gather")), "ring", random.randint(2, 4))
        case "label":
            plans[name] = replace(plans[name], algorithm=random.choice(("ring", "tree")))
    return replace(plan, communication=Communication(communication.means, plans, communication.wire))


def _rename_units(plan: Plan, random: Random) -> Plan:
    """Two microbatches change places, everywhere, or (which is another plan) on one rank only."""
    one, other = random.choices(range(1 + plan.schedule.num_units), k=2)
    names = {one: other, other: one}
    only = random.randrange(len(plan.programs)) if random.random() < 0.3 else None

    def renamed(i: ops.Instruction) -> ops.Instruction:
        if isinstance(i, ops.Overlap):
            return ops.Overlap(*((stage, names.get(unit, unit)) for stage, unit in (i.forward, i.backward)))
        named = isinstance(i, ops.Compute | ops.Message)
        return replace(i, microbatch=names.get(i.microbatch, i.microbatch)) if named else i

    programs = (map(renamed, p) if only in (None, rank) else p for rank, p in enumerate(plan.programs))
    return _with_programs(plan, programs)


def _halves(plan: Plan, random: Random) -> Plan:
    """Cut some backwards into halves, or put halves together where the first one stands."""
    units, stages = range(plan.schedule.num_units), range(len(plan.stage_to_pp))
    chosen = {(s, m) for s in stages for m in units if random.random() < 0.4}
    halves, join = (ops.BwdInput, ops.BwdWeight), random.random() < 0.5

    def changed(i: ops.Instruction) -> Iterable[ops.Instruction]:
        cell = getattr(i, "stage", None), getattr(i, "microbatch", None)
        if isinstance(i, ops.Bwd) and not join and cell in chosen:
            return [half(*cell) for half in halves]
        if isinstance(i, halves) and join and cell in chosen:
            return [ops.Bwd(*cell)] * isinstance(i, ops.BwdInput)
        return [i]

    return _changed(plan, changed)


def _messages(plan: Plan, random: Random) -> Plan:
    """Swap two messages of a channel on both of its ends."""
    sends = [i for program in plan.programs for i in program if isinstance(i, ops.Message)]
    if not sends:
        return plan
    one = random.choice(sends)
    other = random.choice([i for i in sends if type(i) is type(one) and (i.stage, i.peer) == (one.stage, one.peer)])
    units = {one.microbatch: other.microbatch, other.microbatch: one.microbatch}

    def swapped(i: ops.Instruction) -> Iterable[ops.Instruction]:
        is_there = isinstance(i, ops.Message) and i.microbatch in units
        is_same = is_there and (type(i), i.stage, i.peer) == (type(one), one.stage, one.peer)
        changes = is_same or (is_there and i.peer == _home(plan, one.stage))
        return [replace(i, microbatch=units[i.microbatch])] if changes else [i]

    return _changed(plan, swapped)


def _home(plan: Plan, stage: int) -> int:
    return plan.stage_to_pp[stage] if 0 <= stage < len(plan.stage_to_pp) else -1


def _weights(plan: Plan, random: Random) -> Plan:
    """Drop weights in the middle of their use and gather them again, which only ZeRO-3 may."""
    programs = [list(program) for program in plan.programs]
    program = random.choice(programs)
    places = [k for k, i in enumerate(program) if isinstance(i, ops.Fwd | ops.Bwd | ops.BwdInput | ops.Overlap)]
    if places:
        at = random.choice(places)
        stage = getattr(random.choice(program[at].sides), "stage")  # noqa: B009
        program[at:at] = [ops.FreeParams(stage), ops.GatherParams(stage)]
    return _with_programs(plan, programs)


EDITS: tuple[Callable[[Plan, Random], Plan], ...] = (
    *(_pieces, _recompute, _tied, _routes, _homes, _zero, _skips, _losses, _sizes, _blocks, _collective),
    *(_pieces, _recompute, _tied, _rename_units, _halves, _messages, _weights),
)
