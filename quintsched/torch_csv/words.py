"""The words of the format, and the instructions they stand for.

There are two forms. *Compute-only* files hold F, B, I and W alone, and empty cells where a rank idles: our passes add
the rest, as for a schedule of ours. Files *with communication* hold the messages too, whose order is kept, and
`REDUCE_GRAD`, which stands where gradients are summed over the replicas.

What a plan has and torch has not (metrics, the gradient norm, the optimizer) is added on the way in and left out on
the way out. `UNSHARD` and `RESHARD`, FSDP's gathering of weights, are the `GatherParams` and `FreeParams` of a plan
whose replicas share their weights out (`zero=3`); in a plan in which a stage keeps its full weights they are dropped,
with a note. An `OVERLAP_F_B` of a forward and a whole backward is an `Overlap`; one with an input half, or of one
microbatch of one stage, becomes its two parts, in order, as torch's own runtime takes it. Words that wait for a send
or a reduction, which torch 2.15 wants, are written if asked for, and dropped with a note: a run waits where it must.
"""

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
    """What a cell says of its stage; the values are those of torch's `_ComputationType`, the waits since 2.15."""

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
    WAIT_SEND_FORWARD = "WAIT_SEND_F"
    WAIT_SEND_BACKWARD = "WAIT_SEND_B"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"


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

WAITS = {
    Word.WAIT_SEND_FORWARD: Word.SEND_FORWARD,
    Word.WAIT_SEND_BACKWARD: Word.SEND_BACKWARD,
    Word.WAIT_REDUCE_GRAD: Word.REDUCE_GRAD,
}
"""Words that wait for what another one has begun."""

NEEDS = {
    Word.BACKWARD: Word.FORWARD,
    Word.INPUT_HALF: Word.FORWARD,
    Word.WEIGHT_HALF: Word.INPUT_HALF,
    **WAITS,
}
"""Which action of the same stage and microbatch must come first."""

SHARDING: dict[Word, type[GatherParams] | type[FreeParams]] = {
    Word.UNSHARD: GatherParams,
    Word.RESHARD: FreeParams,
}
"""Words about a stage's weights, which may stand several times; a plan has them where replicas share weights out."""
