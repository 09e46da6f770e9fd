"""The words of the format, and the instructions they stand for."""

from __future__ import annotations

from enum import Enum

from quintsched.ir.instructions import (
    Bwd,
    BwdInput,
    BwdWeight,
    Compute,
    FreeParams,
    Fwd,
    GatherParams,
    Message,
    RecvAct,
    RecvGrad,
    SendAct,
    SendGrad,
)


class Word(Enum):
    """What a cell says of its stage; the values are those of torch 2.13's `_ComputationType`."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_HALF = "I"
    WEIGHT_HALF = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"


OVERLAP = "OVERLAP_F_B"
"""The word after two actions in brackets that torch may run at the same time."""

COMPUTATIONS: dict[Word, type[Compute]] = {
    Word.FORWARD: Fwd,
    Word.BACKWARD: Bwd,
    Word.INPUT_HALF: BwdInput,
    Word.WEIGHT_HALF: BwdWeight,
}

MESSAGES: dict[Word, type[Message]] = {
    Word.SEND_FORWARD: SendAct,
    Word.RECV_FORWARD: RecvAct,
    Word.SEND_BACKWARD: SendGrad,
    Word.RECV_BACKWARD: RecvGrad,
}

ENDS_BACKWARD = (Word.BACKWARD, Word.WEIGHT_HALF)
"""Words that complete the weight gradient of a microbatch."""

NEEDS = {
    Word.BACKWARD: Word.FORWARD,
    Word.INPUT_HALF: Word.FORWARD,
    Word.WEIGHT_HALF: Word.INPUT_HALF,
}
"""Which computation of the same stage and microbatch must come first."""

SHARDING: dict[Word, type[GatherParams] | type[FreeParams]] = {
    Word.UNSHARD: GatherParams,
    Word.RESHARD: FreeParams,
}
"""Words about a stage's weights, which may stand several times; a plan has them where replicas share weights out."""
