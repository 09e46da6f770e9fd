"""Data-flow rule: the values that each instruction consumes, reads and produces, as a table of terms.

    Fwd   consumes  the OUTPUT      of the stage BEFORE    of its UNIT
          produces  the OUTPUT      of its OWN stage       of its UNIT             where it is NOT_LAST
          produces  what is SAVED   of its OWN stage       of its UNIT             where the stage KEEPS it
    Clip  reads     WEIGHT_GRADs    of all stages HELD     of EVERY_UNIT

A term states a role (consume, read, produce, follow), whose values they are, which of them, and under which condition.
Only `quintsched.ir.dataflow_analysis` evaluates the table. `quintsched.ir.instruction_values` declares the kinds of
values.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_values import ValueKind


class Role(Enum):
    """Role of a value for an instruction."""

    CONSUMES = auto()
    READS = auto()
    PRODUCES = auto()
    FOLLOWS = auto()
    """Comes after the producer of the value in program order, but does not wait for it."""


class Whose(Enum):
    """Stages whose values a term selects."""

    OWN = auto()
    """Stage of the instruction."""
    BEFORE = auto()
    """Stage before it on the microbatch's route; none where the route begins."""
    HELD = auto()
    """Stages that the rank holds."""
    LATER = auto()
    """Stages to which skips go from the instruction's stage."""
    NAMED = auto()
    """Stages that the instruction names, as far as the rank holds them."""
    RANK = auto()
    """No stage: the value belongs to the rank."""


class Which(Enum):
    """Selection among the values of a stage."""

    UNIT = auto()
    """Value of the instruction's microbatch."""
    EARLIER = auto()
    """Value of the previous slice of the microbatch."""
    EVERY_UNIT = auto()
    """Values of all microbatches that visit the stage."""
    REDUCED_UNITS = auto()
    """Values of the microbatches that the instruction's reduction sums."""
    BUCKET = auto()
    """Value of the instruction's bucket, in its reduction."""
    EVERY_BUCKET = auto()
    """Values of all buckets."""
    EVERY_REDUCTION = auto()
    """Values of all reductions of all buckets."""
    REDUCTION_BEFORE = auto()
    """Values of all buckets, in the reduction before the one that sums the instruction's microbatch."""
    SKIP = auto()
    """Value of the skip that the message names, between the two ranks of the message."""
    EVERY_SKIP = auto()
    """Values of all skips that end, or start, at the stage."""
    TIE = auto()
    """Value of the tie that the instruction names."""
    EVERY_TIE = auto()
    """Values of all ties of the stage."""
    GATHERING = auto()
    """Value of the stage's latest gathering."""
    RANK = auto()
    """Value of the rank."""


class When(Enum):
    """Condition of a term: always, or only …"""

    ALWAYS = auto()
    NOT_LAST = auto()
    """on all stages but the last of the microbatch's route."""
    HAS_LOSS = auto()
    """on stages with a loss: that last stage, and those that the plan names."""
    KEEPS = auto()
    """in training plans, for microbatches whose activations the stage keeps."""
    RECOMPUTES = auto()
    """in training plans, for microbatches whose activations it recomputes."""
    STAYS = auto()
    """for microbatches whose activations stay in device memory."""
    FETCHED = auto()
    """for microbatches whose activations come back from host memory or from another rank."""
    HAS_EARLIER = auto()
    """for slices with an earlier slice in their microbatch."""
    HAS_LATER = auto()
    """for slices with a later slice in their microbatch."""
    STEPS_SHARDS = auto()
    """where replicas step shards of weights that are resident on all of them (ZeRO-1, 2)."""
    SHARDS_GRADIENTS = auto()
    """where replicas shard gradients (ZeRO-2, 3)."""
    SHARDS_WEIGHTS = auto()
    """where replicas shard weights (ZeRO-3)."""


class Term(NamedTuple):
    """Values that an instruction consumes, reads, produces or follows, under one condition."""

    role: Role
    kind: ValueKind
    whose: Whose = Whose.OWN
    which: Which = Which.UNIT
    when: When = When.ALWAYS


CONSUMES, READS, PRODUCES, FOLLOWS = Role
OWN, BEFORE, HELD, LATER, NAMED, OF_RANK = Whose

_ON_WEIGHTS = Term(READS, ValueKind.PARAMS, which=Which.GATHERING, when=When.SHARDS_WEIGHTS)

_BACKWARD = (
    _ON_WEIGHTS,
    Term(CONSUMES, ValueKind.SAVED, when=When.STAYS),
    Term(CONSUMES, ValueKind.FETCHED, when=When.FETCHED),
    Term(CONSUMES, ValueKind.OUTPUT_GRAD, when=When.NOT_LAST),
    Term(PRODUCES, ValueKind.OUTPUT_GRAD, BEFORE),
    Term(CONSUMES, ValueKind.SKIP_GRAD, LATER, Which.EVERY_SKIP),
    Term(PRODUCES, ValueKind.SKIP_GRAD, which=Which.EVERY_SKIP),
    Term(CONSUMES, ValueKind.KEYS, when=When.HAS_LATER),
    Term(CONSUMES, ValueKind.KEYS_GRAD, when=When.HAS_LATER),
    Term(PRODUCES, ValueKind.KEYS_GRAD, which=Which.EARLIER, when=When.HAS_EARLIER),
)

_WEIGHT_GRADIENT = (
    Term(PRODUCES, ValueKind.WEIGHT_GRAD),
    # The previous reduction must be done by then, so that full gradients never pile up.
    Term(FOLLOWS, ValueKind.REDUCED, which=Which.REDUCTION_BEFORE, when=When.SHARDS_GRADIENTS),
)


def _gradients(role: Role, whose: Whose) -> tuple[Term, ...]:
    """Return the terms for all gradients of stages, in the form that the optimizer needs: summed, tied, reduced."""
    return (
        Term(role, ValueKind.WEIGHT_GRAD, whose, Which.EVERY_UNIT),
        Term(role, ValueKind.TIED, whose, Which.EVERY_TIE),
        Term(role, ValueKind.REDUCED, whose, Which.EVERY_REDUCTION),
    )


RULES: dict[type[ins.Instruction], tuple[Term, ...]] = {
    ins.RecvAct: (Term(PRODUCES, ValueKind.OUTPUT, BEFORE),),
    ins.Fwd: (
        _ON_WEIGHTS,
        Term(CONSUMES, ValueKind.OUTPUT, BEFORE),
        Term(PRODUCES, ValueKind.OUTPUT, when=When.NOT_LAST),
        Term(CONSUMES, ValueKind.SKIP, which=Which.EVERY_SKIP),
        Term(PRODUCES, ValueKind.SKIP, LATER, Which.EVERY_SKIP),
        Term(PRODUCES, ValueKind.LOSS, when=When.HAS_LOSS),
        Term(PRODUCES, ValueKind.SAVED, when=When.KEEPS),
        Term(PRODUCES, ValueKind.CHECKPOINT, when=When.RECOMPUTES),
        Term(READS, ValueKind.KEYS, which=Which.EARLIER, when=When.HAS_EARLIER),
        Term(PRODUCES, ValueKind.KEYS, when=When.HAS_LATER),
    ),
    ins.Recompute: (
        _ON_WEIGHTS,
        Term(CONSUMES, ValueKind.CHECKPOINT),
        Term(PRODUCES, ValueKind.SAVED),
        Term(READS, ValueKind.KEYS, which=Which.EARLIER, when=When.HAS_EARLIER),
    ),
    ins.SendAct: (Term(CONSUMES, ValueKind.OUTPUT),),
    ins.RecvSkip: (Term(PRODUCES, ValueKind.SKIP, which=Which.SKIP),),
    ins.SendSkip: (Term(CONSUMES, ValueKind.SKIP, LATER, Which.SKIP),),
    ins.OffloadAct: (Term(CONSUMES, ValueKind.SAVED), Term(PRODUCES, ValueKind.OFFLOADED)),
    ins.FetchAct: (Term(CONSUMES, ValueKind.OFFLOADED), Term(PRODUCES, ValueKind.FETCHED)),
    ins.LendAct: (Term(CONSUMES, ValueKind.SAVED), Term(PRODUCES, ValueKind.LOAN)),
    ins.HoldAct: (Term(PRODUCES, ValueKind.LENT),),
    ins.ReturnAct: (Term(CONSUMES, ValueKind.LENT),),
    ins.ReclaimAct: (Term(CONSUMES, ValueKind.LOAN), Term(PRODUCES, ValueKind.FETCHED)),
    ins.RecvGrad: (Term(PRODUCES, ValueKind.OUTPUT_GRAD),),
    ins.Bwd: (*_BACKWARD, *_WEIGHT_GRADIENT),
    ins.BwdInput: (*_BACKWARD, Term(PRODUCES, ValueKind.PENDING)),
    ins.BwdWeight: (Term(CONSUMES, ValueKind.PENDING), *_WEIGHT_GRADIENT),
    ins.SendGrad: (Term(CONSUMES, ValueKind.OUTPUT_GRAD, BEFORE),),
    ins.RecvSkipGrad: (Term(PRODUCES, ValueKind.SKIP_GRAD, LATER, Which.SKIP),),
    ins.SendSkipGrad: (Term(CONSUMES, ValueKind.SKIP_GRAD, which=Which.SKIP),),
    ins.GatherParams: (Term(PRODUCES, ValueKind.PARAMS, which=Which.GATHERING),),
    ins.FreeParams: (Term(CONSUMES, ValueKind.PARAMS, which=Which.GATHERING),),
    ins.SyncTied: (
        Term(READS, ValueKind.WEIGHT_GRAD, NAMED, Which.EVERY_UNIT),
        Term(PRODUCES, ValueKind.TIED, NAMED, Which.TIE),
    ),
    ins.AllReduceBucket: (
        Term(READS, ValueKind.WEIGHT_GRAD, which=Which.EVERY_UNIT),
        Term(READS, ValueKind.TIED, which=Which.EVERY_TIE),
        Term(PRODUCES, ValueKind.REDUCED, which=Which.BUCKET),
    ),
    ins.ReduceScatterBucket: (
        Term(READS, ValueKind.WEIGHT_GRAD, which=Which.REDUCED_UNITS),
        Term(READS, ValueKind.TIED, which=Which.EVERY_TIE),
        Term(PRODUCES, ValueKind.REDUCED, which=Which.BUCKET),
    ),
    ins.ShareMetrics: (
        Term(CONSUMES, ValueKind.LOSS, HELD, Which.EVERY_UNIT, When.HAS_LOSS),
        Term(PRODUCES, ValueKind.METRICS, OF_RANK, Which.RANK),
    ),
    ins.ClipGrad: (
        Term(READS, ValueKind.METRICS, OF_RANK, Which.RANK),
        *_gradients(READS, HELD),
        Term(PRODUCES, ValueKind.NORM, OF_RANK, Which.RANK),
    ),
    ins.OptStep: (
        *_gradients(CONSUMES, NAMED),
        Term(PRODUCES, ValueKind.STEPPED, NAMED, Which.EVERY_BUCKET, When.STEPS_SHARDS),
        Term(READS, ValueKind.METRICS, OF_RANK, Which.RANK),
        Term(READS, ValueKind.NORM, OF_RANK, Which.RANK),
    ),
    ins.AllGatherBucket: (Term(CONSUMES, ValueKind.STEPPED, which=Which.BUCKET),),
}
"""Terms of each class of instruction."""
