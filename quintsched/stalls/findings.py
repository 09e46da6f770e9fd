"""What a verdict consists of: places in programs, the ranks that are to blame, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from quintsched.errors import printable
from quintsched.ir.instructions import Message
from quintsched.ir.plan_data import PlanData
from quintsched.stalls.states import MOST_TEXT, Fate, RankState

MOST_S = 1e12

Fault: TypeAlias = Literal["ended", "stands", "skipped", "wrong message", "other data"]
"""What a culprit did: its process failed, it does not go on, it passed over a message, or sent one that fits nobody.

Or it was given other data than the other ranks of its replica.
"""

Index = Annotated[int, Field(ge=0, le=2**40)]
Text = Annotated[str, Field(max_length=MOST_TEXT), AfterValidator(lambda text: printable(text, MOST_TEXT))]
"""Words of ranks and of files: what is shown of a verdict is `printable` wherever it came from."""

Seconds = Annotated[float, Field(ge=-MOST_S, le=MOST_S)]


class Strict(BaseModel):
    """Data that is read strictly."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Place(Strict):
    """A place in a rank's program; where there is no instruction, all but the rank and its phase is None.

    `peer` is a global rank; `num_instructions` says how many the program has.
    """

    rank: Index
    phase: Text
    index: Index | None = None
    num_instructions: Index | None = None
    instruction: Text | None = None
    stage: Index | None = None
    microbatch: Index | None = None
    peer: Index | None = None


class Culprit(Strict):
    """A rank that is to blame.

    `place` is that of what it did not do, or where it stands; `stands_at` the place where it said last that it is,
    where it had been for `since_s` seconds. `where` are its coordinates in the mesh, `said` what the receiver says of
    a message that does not fit, what else may have ended the rank, or who was given what.
    """

    rank: Index
    host: Text
    pid: int
    where: tuple[tuple[Text, Index], ...]
    fault: Fault
    fate: Fate | None
    phase: Text
    step: int | None
    place: Place
    stands_at: Index | None
    since_s: Seconds
    said: Text = ""


class Link(Strict):
    """A rank that waits, at which place, since when, and for whom to do what."""

    waiter: Place
    waits_for: Place
    since_s: Seconds


def where_it_stands(plan: PlanData, state: RankState) -> Place:
    """Return the place at which a rank is, as far as it walks the plan."""
    return describe_place(plan, state, state.index if state.program == plan.mode else None)


def describe_place(plan: PlanData, state: RankState, index: int | None) -> Place:
    """Return a place in a rank's program of the plan, with the peer as a global rank."""
    bare = Place(rank=state.rank, phase=state.phase)
    if index is None:
        return bare
    where = plan.mesh.coordinates(state.rank)
    program = plan.programs[where.get("pp", 0)]
    if not 0 <= index < len(program):
        return bare
    instruction = program[index]
    if isinstance(instruction, Message):
        instruction = replace(instruction, peer=plan.mesh.rank(where | {"pp": instruction.peer}))
    return Place(
        rank=state.rank,
        phase=state.phase,
        index=index,
        num_instructions=len(program),
        instruction=str(instruction),
        stage=getattr(instruction, "stage", None),
        microbatch=getattr(instruction, "microbatch", None),
        peer=getattr(instruction, "peer", None),
    )
