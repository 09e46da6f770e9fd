"""What each instruction needs and makes: the single data-flow rule.

Values live on a pipeline rank. An activation that a rank received and one that it computed are the same
value, so two neighbouring stages on one rank hand over in place with no special case:

    rank 0                                   rank 1
    Fwd(0) ──OUTPUT(0)──▶ SendAct(0)  ~~~▶  RecvAct(1) ──OUTPUT(0)──▶ Fwd(1)
       └─SAVED(0)──▶ Bwd(0)                     the input of stage 1 is the output of stage 0

The rule is a table of terms: what an instruction takes away, only looks at, or makes, and whose value that is: its own
stage's, or that of the stage before it on the route. It is read in two ways, for one instruction (`flow`) and for a
whole plan at once (`flows_of`). Placing messages, checking, simulating, running and drawing all ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quintsched import instructions as ins
from quintsched.columns import Columns, Flags, Ints

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
    PENDING = 8
    """What a backward's input half leaves for its weight half."""
    TIED = 9
    """The gradients of tied weights of a stage, added up; the number is the tie's."""
    KEYS = 10
    """The keys and values of a slice and those before it, which the next slice attends to."""
    KEYS_GRAD = 11
    """The gradient of these, from the next slice's backward."""
    CHECKPOINT = 12
    """What a forward keeps of a stage that is recomputed."""


_WORDS = {
    Kind.OUTPUT: "output",
    Kind.OUTPUT_GRAD: "output's gradient",
    Kind.SAVED: "saved activations",
    Kind.LOSS: "loss",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.REDUCED: "reduced gradient",
    Kind.METRICS: "metrics",
    Kind.NORM: "gradient norm",
    Kind.PENDING: "pending weight half",
    Kind.TIED: "tied gradient",
    Kind.KEYS: "keys and values",
    Kind.KEYS_GRAD: "gradient of the keys and values",
    Kind.CHECKPOINT: "checkpoint",
}

_COUNTED = {Kind.REDUCED: "bucket", Kind.TIED: "tie"}
"""What the numbers of values count, where it is not microbatches."""

AMBIENT = frozenset({Kind.METRICS, Kind.NORM})
"""Kinds that may be read any number of times and may stand when the program ends."""


TRAVELS = (Kind.OUTPUT, Kind.OUTPUT_GRAD)
"""Kinds that go from rank to rank."""


class Value(NamedTuple):
    """Something that stands on a rank between two instructions."""

    kind: Kind
    stage: int
    number: int

    def __str__(self) -> str:
        words = _WORDS[self.kind]
        if self.kind in AMBIENT:
            return f"the {words}"
        return f"the {words} of stage {self.stage}, {_COUNTED.get(self.kind, 'microbatch')} {self.number}"


class Role(IntEnum):
    """What an instruction does with a value."""

    CONSUMES = 0
    READS = 1
    PRODUCES = 2


class At(IntEnum):
    """Whose value it is. A value of the stage before is absent where the route begins."""

    OWN = 0
    BEFORE = 1


class When(IntEnum):
    """Where a term holds: everywhere; on the last stage of the route, on all others; in a plan that trains, on stages
    that keep their activations or recompute them; on slices that have one before, or after them in their microbatch."""

    ALWAYS = 0
    LAST = 1
    NOT_LAST = 2
    KEEPS = 3
    RECOMPUTES = 4
    HAS_EARLIER = 5
    HAS_LATER = 6


class Term(NamedTuple):
    """One value that an instruction on (stage, microbatch) takes, reads or makes."""

    role: Role
    kind: Kind
    at: At = At.OWN
    when: When = When.ALWAYS
    shift: int = 0
    """-1: the value is that of the slice before."""


CONSUMES, READS, PRODUCES = Role.CONSUMES, Role.READS, Role.PRODUCES

_BACKWARD = (
    Term(CONSUMES, Kind.SAVED),
    Term(CONSUMES, Kind.OUTPUT_GRAD, when=When.NOT_LAST),
    Term(PRODUCES, Kind.OUTPUT_GRAD, At.BEFORE),
    Term(CONSUMES, Kind.KEYS, when=When.HAS_LATER),
    Term(CONSUMES, Kind.KEYS_GRAD, when=When.HAS_LATER),
    Term(PRODUCES, Kind.KEYS_GRAD, when=When.HAS_EARLIER, shift=-1),
)

RULES: dict[type[ins.Instruction], tuple[Term, ...]] = {
    ins.RecvAct: (Term(PRODUCES, Kind.OUTPUT, At.BEFORE),),
    ins.Fwd: (
        Term(CONSUMES, Kind.OUTPUT, At.BEFORE),
        Term(PRODUCES, Kind.OUTPUT, when=When.NOT_LAST),
        Term(PRODUCES, Kind.LOSS, when=When.LAST),
        Term(PRODUCES, Kind.SAVED, when=When.KEEPS),
        Term(PRODUCES, Kind.CHECKPOINT, when=When.RECOMPUTES),
        Term(READS, Kind.KEYS, when=When.HAS_EARLIER, shift=-1),
        Term(PRODUCES, Kind.KEYS, when=When.HAS_LATER),
    ),
    ins.Recompute: (
        Term(CONSUMES, Kind.CHECKPOINT),
        Term(PRODUCES, Kind.SAVED),
        Term(READS, Kind.KEYS, when=When.HAS_EARLIER, shift=-1),
    ),
    ins.SendAct: (Term(CONSUMES, Kind.OUTPUT),),
    ins.RecvGrad: (Term(PRODUCES, Kind.OUTPUT_GRAD),),
    ins.Bwd: (*_BACKWARD, Term(PRODUCES, Kind.WEIGHT_GRAD)),
    ins.BwdInput: (*_BACKWARD, Term(PRODUCES, Kind.PENDING)),
    ins.BwdWeight: (Term(CONSUMES, Kind.PENDING), Term(PRODUCES, Kind.WEIGHT_GRAD)),
    ins.SendGrad: (Term(CONSUMES, Kind.OUTPUT_GRAD, At.BEFORE),),
}
"""What is done for one microbatch of one stage."""


class Use(NamedTuple):
    """A value that an instruction takes, reads or makes."""

    role: Role
    value: Value


METRICS = Value(Kind.METRICS, 0, 0)
NORM = Value(Kind.NORM, 0, 0)


def _all_reduce_bucket(i: ins.AllReduceBucket, layout: Layout, rank: int) -> Iterator[Use]:
    yield from (Use(READS, value) for value in _local_grads(i.stage, layout))
    yield Use(PRODUCES, Value(Kind.REDUCED, i.stage, i.bucket))


def _sync_tied(i: ins.SyncTied, layout: Layout, rank: int) -> Iterator[Use]:
    number = next((tie.number for tie in layout.ties if tie.params == i.params), 0)
    for stage in (stage for stage in i.stages if layout.rank_of(stage) == rank):
        yield from (Use(READS, value) for value in _weight_grads(stage, layout))
        yield Use(PRODUCES, Value(Kind.TIED, stage, number))


def _share_metrics(i: ins.ShareMetrics, layout: Layout, rank: int) -> Iterator[Use]:
    for stage in layout.stages_of(rank):
        for microbatch in layout.microbatches_of(stage):
            if layout.after(stage, microbatch) < 0:
                yield Use(CONSUMES, Value(Kind.LOSS, stage, microbatch))
    yield Use(PRODUCES, METRICS)


def _clip_grad(i: ins.ClipGrad, layout: Layout, rank: int) -> Iterator[Use]:
    yield Use(READS, METRICS)
    for stage in layout.stages_of(rank):
        yield from (Use(READS, value) for value in _gradients(stage, layout))
    yield Use(PRODUCES, NORM)


def _opt_step(i: ins.OptStep, layout: Layout, rank: int) -> Iterator[Use]:
    for stage in i.stages:
        yield from (Use(CONSUMES, value) for value in _gradients(stage, layout))
    yield Use(READS, METRICS)
    yield Use(READS, NORM)


def _weight_grads(stage: int, layout: Layout) -> Iterator[Value]:
    return (Value(Kind.WEIGHT_GRAD, stage, microbatch) for microbatch in layout.microbatches_of(stage))


def _local_grads(stage: int, layout: Layout) -> Iterator[Value]:
    """All gradients of a stage of this replica, with those of its ties added up."""
    yield from _weight_grads(stage, layout)
    yield from (Value(Kind.TIED, stage, tie.number) for tie in layout.ties_of(stage))


def _gradients(stage: int, layout: Layout) -> Iterator[Value]:
    """All gradients of a stage, in the state in which the optimizer wants them."""
    yield from _local_grads(stage, layout)
    yield from (Value(Kind.REDUCED, stage, bucket) for bucket, _ in layout.reductions)


BATCH_RULES: dict[type[ins.Instruction], Callable[[Any, Layout, int], Iterator[Use]]] = {
    ins.AllReduceBucket: _all_reduce_bucket,
    ins.SyncTied: _sync_tied,
    ins.ShareMetrics: _share_metrics,
    ins.ClipGrad: _clip_grad,
    ins.OptStep: _opt_step,
}
"""What is done for the whole batch: functions, since they run over all microbatches."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What an instruction takes away, what it only looks at, and what it leaves behind."""

    consumes: tuple[Value, ...] = ()
    reads: tuple[Value, ...] = ()
    produces: tuple[Value, ...] = ()


def flow(instruction: ins.Instruction, layout: Layout, rank: int) -> Flow:
    """Return what `instruction` takes, reads and makes on pipeline rank `rank`."""
    used: tuple[list[Value], list[Value], list[Value]] = ([], [], [])
    for role, value in _uses(instruction, layout, rank):
        used[role].append(value)
    return Flow(*map(tuple, used))


def _uses(instruction: Any, layout: Layout, rank: int) -> Iterator[Use]:
    kind = type(instruction)
    if kind in BATCH_RULES:
        yield from BATCH_RULES[kind](instruction, layout, rank)
        return
    stage, microbatch = instruction.stage, instruction.microbatch
    before, after = layout.before(stage, microbatch), layout.after(stage, microbatch)
    slice_number = microbatch % layout.slices
    holds = {
        When.ALWAYS: True,
        When.LAST: after < 0,
        When.NOT_LAST: after >= 0,
        When.KEEPS: layout.trains and not layout.recomputes(stage),
        When.RECOMPUTES: layout.trains and layout.recomputes(stage),
        When.HAS_EARLIER: slice_number > 0,
        When.HAS_LATER: slice_number < layout.slices - 1,
    }
    for term in RULES[kind]:
        owner = stage if term.at is At.OWN else before
        if owner >= 0 and holds[term.when]:
            yield Use(term.role, Value(term.kind, owner, microbatch + term.shift))


@dataclass(frozen=True)
class Uses:
    """Values that instructions take, read or make: entry i says that the instruction in `rows[i]` uses `keys[i]`."""

    rows: Ints
    keys: Ints


@dataclass(frozen=True)
class Flows:
    """The flow of all instructions of a plan at once; values are numbered by `key`."""

    num_stages: int
    num_numbers: int
    consumes: Uses
    reads: Uses
    produces: Uses

    def key(self, value: Value) -> int:
        """Return the number of a value."""
        return (value.kind * self.num_stages + value.stage) * self.num_numbers + value.number

    def value(self, key: int) -> Value:
        """Return the value that a number stands for."""
        rest, number = divmod(int(key), self.num_numbers)
        kind, stage = divmod(rest, self.num_stages)
        return Value(Kind(kind), stage, number)

    def of_kind(self, keys: Ints, *kinds: Kind) -> Flags:
        """Which of the numbered values are of these kinds."""
        return np.isin(keys // (self.num_stages * self.num_numbers), kinds)


def flows_of(columns: Columns, programs: tuple[tuple[ins.Instruction, ...], ...], layout: Layout) -> Flows:
    """Return the flow of every instruction of a well-formed plan; `columns` are those of `programs`."""
    num_stages = len(layout.stage_to_pp)
    num_numbers = max(layout.num_microbatches, len(layout.buckets), len(layout.tied) + 1)
    empty = Uses(np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = Flows(num_stages, num_numbers, empty, empty, empty)
    parts: tuple[list[Uses], list[Uses], list[Uses]] = ([empty], [empty], [empty])
    for role, uses in chain(_unit_uses(columns, layout, found), _batch_uses(columns, programs, layout, found)):
        parts[role].append(uses)
    return Flows(num_stages, num_numbers, *map(_joined, parts))


def _unit_uses(columns: Columns, layout: Layout, flows: Flows) -> Iterator[tuple[Role, Uses]]:
    for kind, terms in RULES.items():
        rows = np.flatnonzero(columns.are(kind))
        stage, microbatch = columns.stage[rows], columns.unit[rows]
        before, after = layout.all_before(stage, microbatch), layout.all_after(stage, microbatch)
        holds = {
            When.ALWAYS: np.ones(len(rows), np.bool_),
            When.LAST: after < 0,
            When.NOT_LAST: after >= 0,
            When.KEEPS: layout.trains & ~layout.recomputing[stage],
            When.RECOMPUTES: layout.trains & layout.recomputing[stage],
            When.HAS_EARLIER: microbatch % layout.slices > 0,
            When.HAS_LATER: microbatch % layout.slices < layout.slices - 1,
        }
        for term in terms:
            owner = stage if term.at is At.OWN else before
            mask = holds[term.when] & (owner >= 0)
            keys = (term.kind * flows.num_stages + owner[mask]) * flows.num_numbers + microbatch[mask] + term.shift
            yield term.role, Uses(rows[mask], keys)


def _batch_uses(
    columns: Columns, programs: tuple[tuple[ins.Instruction, ...], ...], layout: Layout, flows: Flows
) -> Iterator[tuple[Role, Uses]]:
    for row in np.flatnonzero(columns.are(*BATCH_RULES)).tolist():
        rank, index = columns.place(row)
        keys: tuple[list[int], list[int], list[int]] = ([], [], [])
        for role, value in _uses(programs[rank][index], layout, rank):
            keys[role].append(flows.key(value))
        for role, used in zip(Role, keys, strict=True):
            yield role, Uses(np.full(len(used), row), np.array(used, dtype=np.int64))


def _joined(parts: list[Uses]) -> Uses:
    """Return all uses in the order of rows."""
    rows = np.concatenate([part.rows for part in parts])
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(rows, kind="stable")
    return Uses(rows[order], keys[order])


def peer_of(message: ins.Message, layout: Layout) -> int:
    """Return the pp rank that `message` must name as its peer, or -1 where it has nobody to talk to.

    Activations travel to the next stage of the microbatch's route and gradients to the one before.
    """
    forward = isinstance(message, ins.SendAct | ins.RecvGrad)
    other = (layout.after if forward else layout.before)(message.stage, message.microbatch)
    return layout.rank_of(other) if other >= 0 else -1


def message_value(message: ins.Message, layout: Layout) -> Value:
    """Return the value that a message carries: what a send takes and its receive makes."""
    found = flow(message, layout, -1)
    return (found.consumes or found.produces)[0]
