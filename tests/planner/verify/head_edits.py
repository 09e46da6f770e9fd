"""Changes of a plan that go beyond one program: of its head, of its spelled-out collectives, and in several places.

Some are careless, so that head and programs no longer fit each other. Some change all that belongs together, and either
do no harm (microbatches renamed everywhere, a backward cut into halves) or change what the plan means (other pieces of
the model on the stages, with the sums over twins to match).
"""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass, replace
from random import Random
from typing import Any

from quintsched.collectives import Communication, spell
from quintsched.ir import instruction_set as ops
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


def _field(plan: Plan, random: Random) -> Plan:
    """Another value for one of a head's entries, whatever the programs would need for it."""
    last = len(plan.stage_to_pp) - 1
    usual = {
        "stage_to_part": (*range(last + 1),),
        "recompute": (0,) * (last + 1),
        "blocks_per_stage": (1,) * (last + 1),
        "recompute_microbatches": tuple((0,) if every else () for every in plan.recompute) or ((0,),),
    }
    usual |= {"losses": (last,), "tied": {"more": (0, last)}, "skips": {"more": (0, last)}}
    name = random.choice([*usual, "routes", "stage_to_pp", "zero", "schedule", "buckets_per_stage"])
    value = getattr(plan, name) or usual.get(name)
    return replace(plan, **{name: _another(value, random)}) if value else plan


def _another(value: Any, random: Random) -> Any:
    """Change one number: to the next one, or out of its row, into it twice, or to another place in it."""
    if isinstance(value, int):
        return value + random.choice((-1, 1))
    if isinstance(value, dict):
        name = random.choice(sorted(value))
        return value | {name: _another(value[name], random)}
    if is_dataclass(value):
        numbers = [name for name in ("stages", "microbatches", "slices", "stage", "every") if hasattr(value, name)]
        name = random.choice(numbers)
        return replace(value, **{name: _another(getattr(value, name), random)})
    entries = list(value) or [0]
    at = random.randrange(len(entries))
    match random.randrange(4):
        case 0:
            del entries[at]
        case 1:
            entries.insert(random.randrange(len(entries)), entries[at])
        case 2:
            random.shuffle(entries)
        case _:
            entries[at] = _another(entries[at], random)
    return tuple(entries)


def _pieces(plan: Plan, random: Random) -> Plan:
    """Other pieces of the model on the stages, with the sums over twins to match."""
    pieces = list(plan.stage_to_part or range(len(plan.stage_to_pp)))
    if random.random() < 0.5:
        random.shuffle(pieces)
    else:
        pieces[random.randrange(len(pieces))] = random.randint(-1, len(pieces))
    return with_pieces(plan, tuple(pieces)) if len(pieces) == len(plan.stage_to_pp) else plan


def _recompute(plan: Plan, random: Random) -> Plan:
    """Toggle the recomputation of a stage, or of one of its microbatches, with what its backwards then need."""
    stages, slices = range(len(plan.stage_to_pp)), max(plan.schedule.slices, 1)
    recompute = list(plan.recompute or (0 for _ in stages))
    if len(recompute) != len(stages) or len(plan.recompute_microbatches) not in (0, len(stages)):
        return plan
    visits = [{u // slices for route in plan.routes if s in route.stages for u in route.microbatches} for s in stages]
    chosen = [
        {*plan.recompute_microbatches[s]} if plan.recompute_microbatches else visits[s] if recompute[s] else set()
        for s in stages
    ]
    stage = random.choice(stages)
    one = random.random() < 0.5 and visits[stage]
    toggled = {random.choice(sorted(visits[stage]))} if one else chosen[stage] or visits[stage]
    again = chosen[stage] = chosen[stage] ^ toggled
    recompute[stage] = max(recompute[stage], 1) if again else 0

    def fitting(i: ops.Instruction) -> Iterable[ops.Instruction]:
        for side in i.sides:
            if isinstance(side, ops.Compute) and side.stage == stage and side.microbatch // slices in toggled:
                if isinstance(side, ops.Recompute):
                    return
                if isinstance(side, ops.Bwd | ops.BwdInput) and side.microbatch // slices in again:
                    yield ops.Recompute(stage, side.microbatch)
        yield i

    is_all = all(chosen[s] == (visits[s] if recompute[s] else set()) for s in stages)
    named = () if is_all else tuple(tuple(sorted(some)) for some in chosen)
    return _changed(replace(plan, recompute=tuple(recompute), recompute_microbatches=named), fitting)


def _names(plan: Plan, random: Random) -> Plan:
    """Drop a name that a plan ties or skips, with its instructions, or tie a weight more, summed where it is held."""
    for field, kinds, word in (("tied", ops.SyncTied, "params"), ("skips", ops.SKIP_MESSAGES, "skip")):
        names = getattr(plan, field)
        if names and random.random() < 0.5:
            gone = random.choice(sorted(names))
            fewer = replace(plan, **{field: {name: held for name, held in names.items() if name != gone}})
            return _changed(
                fewer, lambda i, k=kinds, w=word, g=gone: [] if isinstance(i, k) and getattr(i, w) == g else [i]
            )
    sync, programs = ops.SyncTied("more", (0, len(plan.stage_to_pp) - 1)), []
    for rank, program in enumerate(plan.programs):
        mine = rank in (plan.stage_to_pp[stage] for stage in sync.stages)
        ends = (k for k, i in enumerate(program) if isinstance(i, ops.Compute | ops.Message | ops.SyncTied))
        at = max(ends, default=-1) + 1
        programs.append([*program[:at], *[sync] * mine, *program[at:]])
    return _with_programs(replace(plan, tied={**plan.tied, "more": sync.stages}), programs)


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
    *(_field,) * 10,
    *(_pieces, _recompute, _names, _collective, _rename_units, _halves, _messages, _weights),
)
