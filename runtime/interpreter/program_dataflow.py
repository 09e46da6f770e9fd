"""Data flow of one rank's program: the values that instructions consume and produce, as the planner defines them.

Fwd(1, 0)      takes OUTPUT of stage 0       makes OUTPUT and SAVED of stage 1
SendAct(1, 0)  takes OUTPUT of stage 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter

from quintsched.ir.dataflow_analysis import Operands, flows_of
from quintsched.ir.instruction_set import ENDS_BACKWARD, Bwd, BwdInput, BwdWeight, ClipGrad, Compute, Instruction, Send
from quintsched.ir.instruction_values import Value, ValueKind
from quintsched.plan import Plan

from .errors_with_rank_and_stage import rank_in_words

_KIND = attrgetter("kind")


class ProgramFlow:
    """The data flow of the program of one (global) rank; message peers are global ranks as well.

    Attributes:
        trains: whether the plan trains; otherwise it runs forward only.
        program, operands: its instructions, and the values that each of them consumes and produces.
        clips: whether it has a `ClipGrad`, which reads the figures of a step.
        pp_rank: the rank's index in its pipeline.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.trains = plan.mode == "train"
        self.program: Sequence[Instruction] = plan.program(rank)
        self.clips = ClipGrad in map(type, self.program)
        self.pp_rank = plan.mesh.pp_rank(rank)
        sides = [side for whole in self.program if whole.computes for side in whole.sides]
        self._last_backwards = frozenset({i.stage: i for i in sides if isinstance(i, ENDS_BACKWARD)}.values())
        self._last_of_inputs = frozenset({i.stage: i for i in sides if isinstance(i, Bwd | BwdInput)}.values())
        self.operands = plan.flows.of_rows(plan.columns.rows_of(self.pp_rank))
        self._flow_of = dict(zip(self.program, self.operands, strict=True)) | self._flows_of_sides()
        self._sent = {value for i, flow in self._flow_of.items() if isinstance(i, Send) for value in flow.consumes}

    def _flows_of_sides(self) -> dict[Instruction, Operands]:
        """Return the data flow of the forward and the backward of each `Overlap`."""
        columns = self.plan.columns.apart.columns
        if columns is self.plan.columns:
            return {}
        rows = columns.rows_of(self.pp_rank)
        return dict(zip(columns.instructions(rows), flows_of(columns, self.plan.layout).of_rows(rows), strict=True))

    @property
    def rank_in_words(self) -> str:
        """The rank and its coordinates in the mesh, in words."""
        return rank_in_words(self.plan.mesh, self.rank)

    def taken(self, instruction: Instruction, *kinds: ValueKind) -> list[Value]:
        """Return the values of these kinds that an instruction consumes."""
        values = self._flow_of[instruction].consumes
        return [*compress(values, map(kinds.__contains__, map(_KIND, values)))]

    def made(self, instruction: Instruction, *kinds: ValueKind) -> list[Value]:
        """Return the values of these kinds that an instruction produces."""
        values = self._flow_of[instruction].produces
        return [*compress(values, map(kinds.__contains__, map(_KIND, values)))]

    def is_sent(self, value: Value) -> bool:
        """Whether a value is sent to another rank."""
        return value in self._sent

    def is_last_of_inputs(self, instruction: Instruction) -> bool:
        """Whether an instruction is the last one that computes input gradients of its stage."""
        return instruction in self._last_of_inputs

    def is_last_backward(self, instruction: Instruction) -> bool:
        """Whether an instruction completes the weight gradients of its stage."""
        return instruction in self._last_backwards

    def reduces_early(self, instruction: Compute) -> bool:
        """Whether buckets that an instruction fills are reduced at once."""
        split = isinstance(instruction, BwdWeight)
        return self.is_last_backward(instruction) and self.plan.layout.reduces_early(instruction.stage, split=split)


def activation_of(gradient: Value) -> Value:
    """Return the activation that a gradient belongs to."""
    return Value(ValueKind.OUTPUT, gradient.stage, gradient.number)
