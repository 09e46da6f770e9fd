"""What the instructions of one rank's program take and make: the planner's data-flow rule, asked in one place.

Fwd(1, 0)      takes OUTPUT of stage 0       makes OUTPUT and SAVED of stage 1
SendAct(1, 0)  takes OUTPUT of stage 1
"""

from __future__ import annotations

from collections.abc import Sequence

from quintsched.ir.dataflow import Flow as Flow
from quintsched.ir.dataflow import flow
from quintsched.ir.instructions import ENDS_BACKWARD, Instruction
from quintsched.ir.values import Kind, Value
from quintsched.plan import Plan


class ProgramFlow:
    """The data flow of the program of one (global) rank, which its messages name their peers by as well."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.trains = plan.mode == "train"
        """Whether the plan trains; else it only runs forward."""
        self.program: Sequence[Instruction] = plan.program(rank)
        self._pp_rank = plan.mesh.coordinates(rank).get("pp", 0)
        last = {i.stage: i for i in self.program if isinstance(i, ENDS_BACKWARD)}
        self._last_backwards = frozenset(last.values())
        self._flows: dict[Instruction, Flow] = {}

    def of(self, instruction: Instruction) -> Flow:
        """Return what an instruction takes and makes."""
        found = self._flows.get(instruction)
        if found is None:
            found = self._flows[instruction] = flow(instruction, self.plan.layout, self._pp_rank)
        return found

    def all(self) -> list[Flow]:
        """Return what each instruction of the program takes and makes."""
        return [self.of(instruction) for instruction in self.program]

    def taken(self, instruction: Instruction, *kinds: Kind) -> list[Value]:
        """Return the values of these kinds that an instruction takes away."""
        return [value for value in self.of(instruction).consumes if value.kind in kinds]

    def made(self, instruction: Instruction, *kinds: Kind) -> list[Value]:
        """Return the values of these kinds that an instruction makes."""
        return [value for value in self.of(instruction).produces if value.kind in kinds]

    def is_last_backward(self, instruction: Instruction) -> bool:
        """Whether an instruction completes the weight gradients of its stage."""
        return instruction in self._last_backwards


def activation_of(gradient: Value) -> Value:
    """Return the activation that a gradient belongs to."""
    return Value(Kind.OUTPUT, gradient.stage, gradient.number)
