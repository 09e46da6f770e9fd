"""Data classes of a verdict: places in programs, culprits, and links between waiting ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quintsched.errors import printable
from quintsched.ir.instruction_set import Message
from quintsched.ir.plan_data import PlanData
from quintsched.stalls.last_reported_rank_states import MOST_TEXT, Fate, RankState

MOST_S = 1e12

Fault: TypeAlias = Literal["ended", "stands", "skipped", "wrong message", "other data"]
"""Fault of a culprit: its process ended, it stands still, it skipped a message, or it sent one that does not fit.

With "other data", it was given another batch than the other ranks of its replica.
"""

StallIndex = Annotated[int, Field(ge=0, le=2**40)]
Text = Annotated[str, Field(max_length=MOST_TEXT), AfterValidator(lambda text: printable(text, MOST_TEXT))]
"""Text from ranks and files, made `printable`."""

Seconds = Annotated[float, Field(ge=-MOST_S, le=MOST_S)]


class Strict(BaseModel):
    """Base class of data that is parsed strictly."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ProgramPlace(Strict):
    """Place in a rank's program; without an instruction, only the rank and its phase are set.

    `peer` is a global rank; `num_instructions` is the length of the program.
    """

    rank: StallIndex
    phase: Text
    index: StallIndex | None = None
    num_instructions: StallIndex | None = None
    instruction: Text | None = None
    stage: StallIndex | None = None
    microbatch: StallIndex | None = None
    peer: StallIndex | None = None


class Culprit(Strict):
    """Rank that is to blame.

    `place` is the instruction that it failed to do, or at which it stands; `stands_at` is the index that it reported
    last, where it had been for `since_s` seconds. `where` are its coordinates in the mesh. `said` is text: the
    receiver's report of a message that does not fit, another possible cause of the rank's end, or the data given to
    each rank.
    """

    rank: StallIndex
    host: Text
    pid: int
    where: tuple[tuple[Text, StallIndex], ...]
    fault: Fault
    fate: Fate | None
    phase: Text
    step: int | None
    place: ProgramPlace
    stands_at: StallIndex | None
    since_s: Seconds
    said: Text = ""


class WaitLink(Strict):
    """Waiting rank with its place, the place on another rank that it waits for, and for how long."""

    waiter: ProgramPlace
    waits_for: ProgramPlace
    since_s: Seconds


def where_it_stands(plan: PlanData, state: RankState) -> ProgramPlace:
    """Return a rank's current place, if it runs a program of this plan."""
    return describe_place(plan, state, state.index if state.program == plan.mode else None)


def describe_place(plan: PlanData, state: RankState, index: int | None) -> ProgramPlace:
    """Return a place in a rank's program, with the peer as a global rank."""
    bare = ProgramPlace(rank=state.rank, phase=state.phase)
    if index is None:
        return bare
    where = plan.mesh.coordinates(state.rank)
    program = plan.programs[where.get("pp", 0)]
    if not 0 <= index < len(program):
        return bare
    instruction = program[index]
    if isinstance(instruction, Message):
        instruction = replace(instruction, peer=plan.mesh.rank(where | {"pp": instruction.peer}))
    return ProgramPlace(
        rank=state.rank,
        phase=state.phase,
        index=index,
        num_instructions=len(program),
        instruction=str(instruction),
        stage=getattr(instruction, "stage", None),
        microbatch=getattr(instruction, "microbatch", None),
        peer=getattr(instruction, "peer", None),
    )
