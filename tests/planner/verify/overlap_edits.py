"""Changes of what runs beside what.

    F1 → B0      join     [F1&B0]      split     B0 F1        swap     [F0&B1]        change     [F1&B3]

A join takes the messages along that would else stand on the wrong side of it, or leaves them: some joins are sound.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from quintsched.ir.instruction_set import Bwd, Fwd, Instruction, Message, Overlap, SendAct
from quintsched.plan import Plan


def changed_pair(program: list[Instruction], index: int, plan: Plan, random: Random) -> list[Instruction]:
    """Return a program with another pair than the one at `index`, or with a pair of the computation there."""
    i = program[index]
    if not isinstance(i, Overlap):
        return _joined(program, index, random)
    match random.randrange(4):
        case 0:
            return [*program[:index], *random.sample(i.sides, 2), *program[index + 1 :]]
        case 1:
            other: Instruction = Overlap(i.backward, i.forward)
        case 2:
            other = random.choice([Fwd(*i.forward), Bwd(*i.backward)])
        case _:
            other = _with_another_number(i, plan, random)
    return [*program[:index], other, *program[index + 1 :]]


def _with_another_number(i: Overlap, plan: Plan, random: Random) -> Overlap:
    side = random.choice(["forward", "backward"])
    stage, unit = getattr(i, side)
    if random.random() < 0.5:
        return replace(i, **{side: (random.randint(0, len(plan.stage_to_pp)), unit)})
    return replace(i, **{side: (stage, random.randint(0, plan.schedule.num_units))})


def _joined(program: list[Instruction], index: int, random: Random) -> list[Instruction]:
    """Put a forward and the next backward, or a backward and the next forward, side by side where one of them is."""
    i = program[index]
    wanted = Bwd if isinstance(i, Fwd) else Fwd
    later = next((k for k in range(index + 1, len(program)) if isinstance(program[k], wanted)), None)
    if later is None:
        return program
    pair = [i, program[later]]
    forward, backward = sorted((type(side) is Bwd, side.stage, side.microbatch) for side in pair)
    together = Overlap(forward[1:], backward[1:])
    between, behind = program[index + 1 : later], program[later + 1 :]
    match random.randrange(3):
        case 0:
            return [*program[:index], together, *between, *behind]
        case 1:
            return [*program[:index], *between, together, *behind]
        case _:
            sends = [k for k in between if isinstance(k, Message) and _of(k, i)]
            rest = [k for k in between if k not in sends]
            return [*program[:index], *rest, together, *sends, *behind]


def _of(message: Message, i: Instruction) -> bool:
    """Whether a message takes away what a computation makes."""
    given = (message.stage, message.microbatch) == (i.stage, i.microbatch)
    return given and isinstance(message, SendAct) == isinstance(i, Fwd) and "Send" in message.op
