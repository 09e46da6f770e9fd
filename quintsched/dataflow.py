"""What each instruction needs and makes: the single data-flow rule.

Values live on a pipeline rank. An activation that a rank received and one that it computed are the same
value, so two neighbouring stages on one rank hand over in place with no special case:

    rank 0                                   rank 1
    Fwd(0) ──OUTPUT(0)──▶ SendAct(0)  ~~~▶  RecvAct(1) ──OUTPUT(0)──▶ Fwd(1)
       └─SAVED(0)──▶ Bwd(0)                     the input of stage 1 is the output of stage 0

Placing messages, checking, simulating, running and drawing all ask `flow` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from quintsched import instructions as ins

if TYPE_CHECKING:
    from quintsched.layout import Layout


class Kind(IntEnum):
    """What a value is; the `number` of a value is a microbatch unless said otherwise."""

    OUTPUT = 0
    """The output activation of a stage."""
    OUTPUT_GRAD = 1
    """The gradient of a stage's output."""
    SAVED = 2
    """What a forward keeps for its backward."""
    LOSS = 3
    """The loss of a microbatch, on the last stage."""
    WEIGHT_GRAD = 4
    """A microbatch's share of a stage's weight gradients."""
    REDUCED = 5
    """A bucket (the number) of gradients, summed over the replicas."""
    METRICS = 6
    """The batch's loss, loss weight and metrics, known on this rank."""
    NORM = 7
    """The global gradient norm."""


_WORDS = {
    Kind.OUTPUT: "output",
    Kind.OUTPUT_GRAD: "output's gradient",
    Kind.SAVED: "saved activations",
    Kind.LOSS: "loss",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.REDUCED: "reduced gradient",
    Kind.METRICS: "metrics",
    Kind.NORM: "gradient norm",
}

AMBIENT = frozenset({Kind.METRICS, Kind.NORM})
"""Kinds that may be read any number of times and may stand when the program ends."""


class Value(NamedTuple):
    """Something that stands on a rank between two instructions."""

    kind: Kind
    stage: int
    number: int

    def __str__(self) -> str:
        words = _WORDS[self.kind]
        if self.kind in AMBIENT:
            return f"the {words}"
        which = "bucket" if self.kind is Kind.REDUCED else "microbatch"
        return f"the {words} of stage {self.stage}, {which} {self.number}"


@dataclass(frozen=True, slots=True)
class Flow:
    """What an instruction takes away, what it only looks at, and what it leaves behind."""

    consumes: tuple[Value, ...] = ()
    reads: tuple[Value, ...] = ()
    produces: tuple[Value, ...] = ()


METRICS = Value(Kind.METRICS, 0, 0)
NORM = Value(Kind.NORM, 0, 0)


def _recv_act(i: ins.RecvAct, layout: Layout) -> Flow:
    return Flow(produces=(Value(Kind.OUTPUT, layout.before(i.stage, i.microbatch), i.microbatch),))


def _fwd(i: ins.Fwd, layout: Layout) -> Flow:
    before, after = layout.before(i.stage, i.microbatch), layout.after(i.stage, i.microbatch)
    taken = (Value(Kind.OUTPUT, before, i.microbatch),) if before >= 0 else ()
    made = Value(Kind.OUTPUT if after >= 0 else Kind.LOSS, i.stage, i.microbatch)
    saved = (Value(Kind.SAVED, i.stage, i.microbatch),) if layout.trains else ()
    return Flow(consumes=taken, produces=(made, *saved))


def _send_act(i: ins.SendAct, layout: Layout) -> Flow:
    return Flow(consumes=(Value(Kind.OUTPUT, i.stage, i.microbatch),))


def _recv_grad(i: ins.RecvGrad, layout: Layout) -> Flow:
    return Flow(produces=(Value(Kind.OUTPUT_GRAD, i.stage, i.microbatch),))


def _bwd(i: ins.Bwd, layout: Layout) -> Flow:
    before, after = layout.before(i.stage, i.microbatch), layout.after(i.stage, i.microbatch)
    saved = Value(Kind.SAVED, i.stage, i.microbatch)
    taken = (Value(Kind.OUTPUT_GRAD, i.stage, i.microbatch),) if after >= 0 else ()
    made = (Value(Kind.OUTPUT_GRAD, before, i.microbatch),) if before >= 0 else ()
    return Flow(consumes=(saved, *taken), produces=(*made, Value(Kind.WEIGHT_GRAD, i.stage, i.microbatch)))


def _send_grad(i: ins.SendGrad, layout: Layout) -> Flow:
    return Flow(consumes=(Value(Kind.OUTPUT_GRAD, layout.before(i.stage, i.microbatch), i.microbatch),))


def _all_reduce_bucket(i: ins.AllReduceBucket, layout: Layout) -> Flow:
    return Flow(reads=_weight_grads(i.stage, layout), produces=(Value(Kind.REDUCED, i.stage, i.bucket),))


def _share_metrics(i: ins.ShareMetrics, layout: Layout, rank: int) -> Flow:
    losses = tuple(
        Value(Kind.LOSS, stage, microbatch)
        for stage in layout.stages_of(rank)
        for microbatch in layout.microbatches_of(stage)
        if layout.after(stage, microbatch) < 0
    )
    return Flow(consumes=losses, produces=(METRICS,))


def _clip_grad(i: ins.ClipGrad, layout: Layout, rank: int) -> Flow:
    gradients = tuple(value for stage in layout.stages_of(rank) for value in _gradients(stage, layout))
    return Flow(reads=(METRICS, *gradients), produces=(NORM,))


def _opt_step(i: ins.OptStep, layout: Layout) -> Flow:
    gradients = (value for stage in i.stages for value in _gradients(stage, layout))
    return Flow(consumes=tuple(gradients), reads=(METRICS, NORM))


def _weight_grads(stage: int, layout: Layout) -> tuple[Value, ...]:
    return tuple(Value(Kind.WEIGHT_GRAD, stage, microbatch) for microbatch in layout.microbatches_of(stage))


def _gradients(stage: int, layout: Layout) -> tuple[Value, ...]:
    """All gradients of a stage, in the state in which the optimizer wants them."""
    buckets = range(layout.buckets_per_stage if layout.reduces else 0)
    return (*_weight_grads(stage, layout), *(Value(Kind.REDUCED, stage, bucket) for bucket in buckets))


_Rule = Callable[[Any, "Layout"], Flow]
_RankRule = Callable[[Any, "Layout", int], Flow]

_RULES: dict[type[ins.Instruction], _Rule] = {
    ins.RecvAct: _recv_act,
    ins.Fwd: _fwd,
    ins.SendAct: _send_act,
    ins.RecvGrad: _recv_grad,
    ins.Bwd: _bwd,
    ins.SendGrad: _send_grad,
    ins.AllReduceBucket: _all_reduce_bucket,
    ins.OptStep: _opt_step,
}
_RANK_RULES: dict[type[ins.Instruction], _RankRule] = {
    ins.ShareMetrics: _share_metrics,
    ins.ClipGrad: _clip_grad,
}


def flow(instruction: ins.Instruction, layout: Layout, rank: int) -> Flow:
    """Return what `instruction` consumes, reads and produces on pipeline rank `rank`."""
    rule = _RULES.get(type(instruction))
    if rule is not None:
        return rule(instruction, layout)
    return _RANK_RULES[type(instruction)](instruction, layout, rank)


def peer_of(message: ins.Message, layout: Layout) -> int:
    """Return the pp rank that `message` must name as its peer, or -1 where it has nobody to talk to.

    Activations travel to the next stage of the microbatch's route and gradients to the one before.
    """
    forward = isinstance(message, ins.SendAct | ins.RecvGrad)
    other = (layout.after if forward else layout.before)(message.stage, message.microbatch)
    return layout.rank_of(other) if other >= 0 else -1


def message_value(message: ins.Message, layout: Layout) -> Value:
    """Return the value that a message carries: what a send consumes and its receive produces."""
    found = flow(message, layout, -1)
    return (found.consumes or found.produces)[0]


Flows = list[list[Flow]]


def flows_of(programs: tuple[tuple[ins.Instruction, ...], ...], layout: Layout) -> Flows:
    """Return the flow of every instruction of every program, in the same places."""
    return [[flow(i, layout, rank) for i in program] for rank, program in enumerate(programs)]
