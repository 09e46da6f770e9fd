"""What each instruction needs and makes: the single data-flow rule.

Values live on a pipeline rank. An activation that a rank received and one that it computed are the same
value, so two neighbouring stages on one rank hand over in place with no special case:

    rank 0                                   rank 1
    Fwd(0) ──OUTPUT(0)──▶ SendAct(0)  ~~~▶  RecvAct(1) ──OUTPUT(0)──▶ Fwd(1)
       └─SAVED(0)──▶ Bwd(0)                     the input of stage 1 is the output of stage 0

The rule is a table of terms: what an instruction takes away, only looks at, or makes, and whose value that is: its own
stage's, or that of the stage before it on the route. It is read in two ways, for one instruction (`flow`) and for a
whole plan at once (`flows_of`). Placing messages, checking, simulating, running and drawing all ask here.

Full weights that are shared out over replicas come and go several times: the number of such a value counts the times.
What values there are stands in `quintsched.ir.values`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quintsched.ir import instructions as ins
from quintsched.ir.columns import Columns, Flags, Ints
from quintsched.ir.values import METRICS, NORM, PART
from quintsched.ir.values import Kind as Kind
from quintsched.ir.values import Value as Value

if TYPE_CHECKING:
    from quintsched.ir.layout import Layout


class Role(IntEnum):
    """What an instruction does with a value."""

    CONSUMES = 0
    READS = 1
    PRODUCES = 2
    FOLLOWS = 3
    """It stands after what makes the value, in the program, but does not wait for it."""


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


CONSUMES, READS, PRODUCES, FOLLOWS = Role

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


ON_WEIGHTS: dict[type[ins.Instruction], Role] = {
    ins.GatherParams: PRODUCES,
    ins.FreeParams: CONSUMES,
    **dict.fromkeys(ins.NEEDS_WEIGHTS, READS),
}
"""What is done with the full weights of a stage, where its replicas hold shares of them."""


class Use(NamedTuple):
    """A value that an instruction takes, reads or makes."""

    role: Role
    value: Value


def _all_reduce_bucket(i: ins.AllReduceBucket, layout: Layout, rank: int) -> Iterator[Use]:
    yield from (Use(READS, value) for value in _local_grads(i.stage, layout))
    yield Use(PRODUCES, Value(Kind.REDUCED, i.stage, i.bucket))


def _reduce_scatter_bucket(i: ins.ReduceScatterBucket, layout: Layout, rank: int) -> Iterator[Use]:
    parts = layout.parts_of(i.stage)
    for microbatch in parts[i.part] if i.part < len(parts) else ():
        yield Use(READS, Value(Kind.WEIGHT_GRAD, i.stage, microbatch))
    yield from (Use(READS, Value(Kind.TIED, i.stage, tie.number)) for tie in layout.ties_of(i.stage))
    yield Use(PRODUCES, _reduced(i.stage, i.bucket, i.part))


def _all_gather_bucket(i: ins.AllGatherBucket, layout: Layout, rank: int) -> Iterator[Use]:
    yield Use(CONSUMES, Value(Kind.STEPPED, i.stage, i.bucket))


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
        if layout.zero.shares_optimizer and not layout.zero.shares_weights:
            yield from (Use(PRODUCES, Value(Kind.STEPPED, stage, bucket)) for bucket, _ in layout.reductions)
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
    for part in range(len(layout.parts_of(stage))):
        yield from (_reduced(stage, bucket, part) for bucket, _ in layout.reductions)


def _reduced(stage: int, bucket: int, part: int) -> Value:
    return Value(Kind.REDUCED, stage, part * PART + bucket)


def _emptied(stage: int, microbatch: int, layout: Layout) -> Iterator[Use]:
    """The part that has to be reduced before this microbatch's gradient is added up: full ones never pile up."""
    part = layout.part_number(stage, microbatch) if layout.zero.shares_gradients else 0
    if part:
        yield from (Use(FOLLOWS, _reduced(stage, bucket, part - 1)) for bucket, _ in layout.reductions)


BATCH_RULES: dict[type[ins.Instruction], Callable[[Any, Layout, int], Iterator[Use]]] = {
    ins.AllReduceBucket: _all_reduce_bucket,
    ins.ReduceScatterBucket: _reduce_scatter_bucket,
    ins.AllGatherBucket: _all_gather_bucket,
    ins.SyncTied: _sync_tied,
    ins.ShareMetrics: _share_metrics,
    ins.ClipGrad: _clip_grad,
    ins.OptStep: _opt_step,
}
"""What is done for the whole batch: functions, since they run over all microbatches."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What an instruction takes away, what it only looks at, what it leaves behind, and what it has to stand after."""

    consumes: tuple[Value, ...] = ()
    reads: tuple[Value, ...] = ()
    produces: tuple[Value, ...] = ()
    follows: tuple[Value, ...] = ()


def flow(instruction: ins.Instruction, layout: Layout, rank: int, gathering: int = 0) -> Flow:
    """Return what `instruction` takes, reads and makes on pipeline rank `rank`.

    `gathering` counts how often the full weights of its stage were gathered before: see `gatherings`.
    """
    used: tuple[list[Value], ...] = tuple([] for _ in Role)
    for role, value in _uses(instruction, layout, rank, gathering):
        used[role].append(value)
    return Flow(*map(tuple, used))


def gatherings(program: Iterable[ins.Instruction]) -> Iterator[int]:
    """Yield for each instruction of a program which gathering of its stage's weights it makes, uses or ends."""
    times: Counter[int] = Counter()
    for i in program:
        stage = getattr(i, "stage", -1)
        times[stage] += isinstance(i, ins.GatherParams)
        yield max(times[stage] - 1, 0)


def _uses(instruction: Any, layout: Layout, rank: int, gathering: int = 0) -> Iterator[Use]:
    kind = type(instruction)
    if kind in ON_WEIGHTS and (kind not in RULES or layout.zero.shares_weights):
        yield Use(ON_WEIGHTS[kind], Value(Kind.PARAMS, instruction.stage, gathering))
    if kind in BATCH_RULES:
        yield from BATCH_RULES[kind](instruction, layout, rank)
    if kind not in RULES:
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
    if kind in ins.ENDS_BACKWARD:
        yield from _emptied(stage, microbatch, layout)


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
    follows: Uses

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
    numbers = [layout.num_microbatches, len(layout.buckets), len(layout.tied) + 1]
    if layout.zero.shares_optimizer:
        numbers += [PART * max(len(layout.parts_of(stage)) for stage in range(num_stages))]
        numbers += [int(columns.are(ins.GatherParams).sum())]
    empty = Uses(np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = Flows(num_stages, max(numbers), empty, empty, empty, empty)
    parts: tuple[list[Uses], ...] = tuple([empty] for _ in Role)
    of_units, of_batch = _unit_uses(columns, layout, found), _batch_uses(columns, programs, layout, found)
    of_shares = _share_uses(columns, programs, layout, found) if layout.zero.shares_optimizer else ()
    for role, uses in chain(of_units, of_batch, of_shares):
        parts[role].append(uses)
    return Flows(num_stages, found.num_numbers, *map(_joined, parts))


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
        keys: tuple[list[int], ...] = tuple([] for _ in Role)
        for role, value in _uses(programs[rank][index], layout, rank):
            keys[role].append(flows.key(value))
        for role, used in zip(Role, keys, strict=True):
            yield role, Uses(np.full(len(used), row), np.array(used, dtype=np.int64))


def _share_uses(
    columns: Columns, programs: tuple[tuple[ins.Instruction, ...], ...], layout: Layout, flows: Flows
) -> Iterator[tuple[Role, Uses]]:
    """What is done with full weights and gradients that do not stand all the time."""
    if layout.zero.shares_weights:
        gathering = np.array([number for program in programs for number in gatherings(program)], dtype=np.int64)
        for kind, role in ON_WEIGHTS.items():
            rows = np.flatnonzero(columns.are(kind))
            keys = (Kind.PARAMS * flows.num_stages + columns.stage[rows]) * flows.num_numbers + gathering[rows]
            yield role, Uses(rows, keys)
    for row in np.flatnonzero(columns.are(*ins.ENDS_BACKWARD)).tolist():
        found = [flows.key(use.value) for use in _emptied(int(columns.stage[row]), int(columns.unit[row]), layout)]
        yield FOLLOWS, Uses(np.full(len(found), row), np.array(found, dtype=np.int64))


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
