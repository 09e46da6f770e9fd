"""Edits of one program of a plan, as rows of tables name them.

`what` is an instruction, or a class of which the first is meant.

    drop(Bwd(1, 2))   double(SendAct)   swap(Fwd(0, 0), Fwd(0, 1))   put(Fwd, Fwd(7, 0))   move(ClipGrad, after=OptStep)
"""

from collections.abc import Callable

from quintsched.ir.instruction_set import Instruction
from quintsched.plan import Plan
from tests.planner.verify.mutants import with_program

What = Instruction | type[Instruction]
Edit = Callable[[list[Instruction]], None]


def edited(plan: Plan, rank: int, *edits: Edit) -> Plan:
    """Return the plan with edits, in this order, of one program."""
    program = list(plan.programs[rank])
    for edit in edits:
        edit(program)
    return with_program(plan, rank, program)


def index_of(program: list[Instruction], what: What) -> int:
    return next(k for k, i in enumerate(program) if what in (i, type(i)))


def drop(what: What) -> Edit:
    return lambda program: program.__delitem__(index_of(program, what))


def every(kind: type[Instruction], change: Callable[[Instruction], list[Instruction]]) -> Edit:
    """Put others in the place of all of a kind."""

    def edit(program: list[Instruction]) -> None:
        program[:] = [new for i in program for new in (change(i) if isinstance(i, kind) else [i])]

    return edit


def put(what: What, *others: Instruction) -> Edit:
    """Put others in the place of one."""

    def edit(program: list[Instruction]) -> None:
        at = index_of(program, what)
        program[at : at + 1] = others

    return edit


def add(new: Instruction, *, before: What) -> Edit:
    return lambda program: program.insert(index_of(program, before), new)


def double(what: What) -> Edit:
    return lambda program: program.insert(at := index_of(program, what), program[at])


def swap(what: What, other: What) -> Edit:
    def edit(program: list[Instruction]) -> None:
        one, two = index_of(program, what), index_of(program, other)
        program[one], program[two] = program[two], program[one]

    return edit


def move(what: What, *, before: What | None = None, after: What | None = None) -> Edit:
    """Take one out, and put it back beside another."""

    def edit(program: list[Instruction]) -> None:
        moved = program.pop(index_of(program, what))
        place = index_of(program, before) if before else index_of(program, after) + 1  # type: ignore[arg-type]
        program.insert(place, moved)

    return edit
