"""Vocabulary of the format, and the instructions that its words stand for.

There are two forms. *Compute-only* files hold F, B, I and W alone, and empty cells where a rank idles: the passes add
all other instructions, as for a schedule of this package. Files *with communication* also hold the messages, whose
order is kept, and `REDUCE_GRAD`, at which gradients are summed over the replicas.

Instructions of a plan that torch does not have (metrics, gradient norm, optimizer) are added by the import and left
out by the export. `UNSHARD` and `RESHARD`, FSDP's gathering of weights, are the `GatherParams` and `FreeParams` of a
plan whose replicas shard their weights (`zero=3`); for other plans they are dropped, with a note. An `OVERLAP_F_B` of
a forward and a full backward is an `Overlap`; one with an input half, or of one microbatch of one stage, becomes its
two parts, in order, as in torch's own runtime. Words that wait for a send or a reduction, required since torch 2.15,
are written on request, and dropped on import with a note: the runtime waits where it must.
"""

from __future__ import annotations

from enum import Enum

from quintsched.ir.instruction_set import (
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
    """Words of actions; the values are those of torch's `_ComputationType`, the waits since torch 2.15."""

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
"""Word after two actions in brackets that torch may run concurrently."""

COMPUTATIONS: dict[Word, type[Compute]] = {
    Word.FORWARD: Fwd,
    Word.BACKWARD: Bwd,
    Word.INPUT_HALF: BwdInput,
    Word.WEIGHT_HALF: BwdWeight,
}

MESSAGE_WORDS: dict[Word, type[Message]] = {
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
"""Words that wait for an action that another word has started."""

NEEDS = {
    Word.BACKWARD: Word.FORWARD,
    Word.INPUT_HALF: Word.FORWARD,
    Word.WEIGHT_HALF: Word.INPUT_HALF,
    **WAITS,
}
"""Action of the same stage and microbatch that must come first."""

SHARDING: dict[Word, type[GatherParams] | type[FreeParams]] = {
    Word.UNSHARD: GatherParams,
    Word.RESHARD: FreeParams,
}
"""Words for gathering and freeing a stage's weights, which may occur several times; kept if replicas shard weights."""
