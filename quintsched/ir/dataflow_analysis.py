"""Data-flow analysis: the values that each instruction consumes, reads and produces, by one rule.

Values are resident on a pipeline rank. A received activation and a locally computed one are the same value, so
neighbouring stages on one rank pass it in place, without a special case:

    rank 0                                   rank 1
    Fwd(0) ──OUTPUT(0)──▶ SendAct(0)  ~~~▶  RecvAct(1) ──OUTPUT(0)──▶ Fwd(1)
       └─SAVED(0)──▶ Bwd(0)                     the input of stage 1 is the output of stage 0

The rule is a table in `quintsched.ir.instruction_inputs_and_outputs`, evaluated only here, for a whole plan at once.
Placement of messages, checks, simulation, the runtime and drawings all use the result. Full weights that are sharded
over replicas are gathered several times: the number of such a value counts the gatherings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_columns import ABSENT, Columns, Flags, Ints
from quintsched.ir.instruction_inputs_and_outputs import (
    CONSUMES,
    FOLLOWS,
    PRODUCES,
    READS,
    RULES,
    Role,
    Term,
    When,
    Which,
    Whose,
)
from quintsched.ir.instruction_values import SKIPS, TRAVELS, Numbering
from quintsched.ir.instruction_values import Value as Value
from quintsched.ir.instruction_values import ValueKind as ValueKind
from quintsched.ir.layout import Layout
from quintsched.ir.ragged import Ragged


@dataclass(frozen=True, slots=True)
class Operands:
    """Values of one instruction: consumed, only read, produced, and those whose producers it must come after."""

    consumes: tuple[Value, ...] = ()
    reads: tuple[Value, ...] = ()
    produces: tuple[Value, ...] = ()
    follows: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False)
class Uses:
    """Uses of values (consumed, read or produced) by instructions: `rows[i]` uses the value at `places[i]`.

    A place is an index of a (value, rank) pair. A value that travels is resident on its sender and on its receiver: on
    the rank that holds its stage the place is its key, on the other rank the key plus the number of keys. So two uses
    concern the same value on the same rank if their places are equal.
    """

    rows: Ints
    places: Ints

    @cached_property
    def by_row(self) -> Ints:
        """Permutation that sorts the uses by row, and within a row by the order of the rule."""
        return np.argsort(self.rows, kind="stable")

    def of_rows(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (row, place) of all uses in rows `first` to `end` - 1, in order."""
        rows = self.rows[self.by_row]
        mine = self.by_row[np.searchsorted(rows, first) : np.searchsorted(rows, end)]
        return zip(self.rows[mine].tolist(), self.places[mine].tolist(), strict=True)


@dataclass(frozen=True, eq=False)
class Flows:
    """Data flow of all instructions of a plan, as arrays."""

    numbering: Numbering
    consumes: Uses
    reads: Uses
    produces: Uses
    follows: Uses

    @cached_property
    def first_makers(self) -> Ints:
        """First row that produces the value, per place; `ABSENT` if none does."""
        return _first_rows(self.produces.rows, self.produces.places, self.num_places)

    @cached_property
    def first_takers(self) -> Ints:
        """First row that consumes the value, per place; `ABSENT` if none does."""
        return _first_rows(self.consumes.rows, self.consumes.places, self.num_places)

    @cached_property
    def first_senders(self) -> Ints:
        """First row of any rank that produces the value, per key of a travelling value; `ABSENT` if none does."""
        keys = self.keys(self.produces.places)
        travels = keys < self.numbering.num_travelling
        return _first_rows(self.produces.rows[travels], keys[travels], self.numbering.num_travelling)

    @property
    def num_places(self) -> int:
        """Number of places: (value, rank) pairs."""
        return self.numbering.size + self.numbering.num_travelling

    def keys(self, places: Ints) -> Ints:
        """Return the key of the value at each place."""
        size = self.numbering.size
        return places - (places >= size) * size

    def value_at(self, place: int) -> Value:
        """Return the value at a place."""
        return self.numbering.value(place if place < self.numbering.size else place - self.numbering.size)

    def of_rows(self, rows: range) -> list[Operands]:
        """Return the `Operands` of each of these rows."""
        found: list[tuple[list[Value], ...]] = [([], [], [], []) for _ in rows]
        size, value = self.numbering.size, cache(self.numbering.value)
        for number, uses in enumerate((self.consumes, self.reads, self.produces, self.follows)):
            for row, place in uses.of_rows(rows.start, rows.stop):
                found[row - rows.start][number].append(value(place if place < size else place - size))
        return [Operands(*map(tuple, used)) for used in found]


def flow(instruction: ins.Instruction, layout: Layout, rank: int, *gatherings: int) -> Operands:
    """Return the values that one instruction consumes, reads and produces on pipeline rank `rank`.

    `gatherings` counts, for each of its sides, how often the full weights of the stage were gathered before. For
    instructions within a plan `Flows.of_rows` is faster, and derives that count.
    """
    programs = [[instruction] if k == rank else [] for k in range(max(layout.num_ranks, rank + 1))]
    known = np.array(gatherings or [0] * len(instruction.sides))
    return flows_of(Columns.from_programs(programs), layout, known).of_rows(range(1))[0]


def flows_of(columns: Columns, layout: Layout, gatherings: Ints | None = None) -> Flows:
    """Return the data flow of all instructions of a well-formed plan.

    The flow of an `Overlap` is that of its sides, the forward's first. `gatherings`, if known, gives for each row of
    `columns.apart` the number of the gathering of its stage's weights that it makes, uses or ends.
    """
    apart, origin = columns.apart
    reader = _Reader.from_columns(apart, layout, gatherings)
    found: dict[Role, list[tuple[Ints, Ints]]] = {role: [] for role in Role}
    for kind, terms in RULES.items():
        rows = apart.rows_where(kind)
        for term in terms if len(rows) else ():
            used, places = reader.read_term(term, rows)
            if len(used):
                found[term.role].append((origin[used], places))
    return Flows(reader.numbering, *(_joined(found[role]) for role in (CONSUMES, READS, PRODUCES, FOLLOWS)))


def _joined(parts: list[tuple[Ints, Ints]]) -> Uses:
    nothing = np.zeros(0, np.int64)
    return Uses(*(np.concatenate(column) for column in zip(*parts, strict=True))) if parts else Uses(nothing, nothing)


def _first_rows(rows: Ints, at: Ints, size: int) -> Ints:
    """Return the smallest row at each place, `ABSENT` if there is none."""
    nobody = np.iinfo(np.int64).max
    found = np.full(size, nobody)
    np.minimum.at(found, at, rows)
    found[found == nobody] = ABSENT
    return found


class _Cells(NamedTuple):
    """Stages, and later values, that a term selects: one entry per pair of row and stage, later of row and value."""

    rows: Ints
    stages: Ints
    numbers: Ints


@dataclass(frozen=True, eq=False)
class _Reader:
    """Evaluator of the rule's terms for many rows at once."""

    columns: Columns
    layout: Layout
    numbering: Numbering
    gatherings: Ints
    holders: Ints

    @classmethod
    def from_columns(cls, columns: Columns, layout: Layout, gatherings: Ints | None) -> _Reader:
        if gatherings is None:
            gatherings = gatherings_of(columns) if layout.zero.shards_weights else np.zeros(len(columns), np.int64)
        counts = dict.fromkeys(ValueKind, layout.num_microbatches)
        counts[ValueKind.METRICS] = counts[ValueKind.NORM] = columns.num_ranks
        counts[ValueKind.REDUCED] = len(layout.buckets) * layout.most_reductions
        counts[ValueKind.TIED] = max((tie.number for tie in layout.ties), default=0) + 1
        counts[ValueKind.PARAMS] = int(gatherings.max(initial=0)) + 1
        counts[ValueKind.STEPPED] = len(layout.buckets)
        counts[ValueKind.SKIP] = counts[ValueKind.SKIP_GRAD] = layout.num_microbatches * len(layout.skips)
        numbering = Numbering(len(layout.stage_to_pp), counts, len(layout.buckets), len(layout.skips))
        return cls(columns, layout, numbering, gatherings, np.array(layout.stage_to_pp, np.int64))

    def read_term(self, term: Term, rows: Ints) -> tuple[Ints, Ints]:
        """Return (rows, places) of the uses that a term yields for rows of one class of instruction."""
        cells = self._skips(term, rows) if term.kind in SKIPS else self._whose(term.whose, rows)
        if term.when in _OF_PLAN and not _OF_PLAN[term.when](self.layout):
            cells = _kept(cells, np.zeros(len(cells.rows), np.bool_))
        if term.when in _OF_CELL and term.which is not Which.EVERY_UNIT:
            cells = _kept(cells, _OF_CELL[term.when](cells.stages, self.columns.unit[cells.rows], self.layout))
        cells = self._which(term.which, cells)
        if term.when in _OF_CELL and term.which is Which.EVERY_UNIT:
            cells = _kept(cells, _OF_CELL[term.when](cells.stages, cells.numbers, self.layout))
        keys = self.numbering.keys(term.kind, cells.stages, cells.numbers)
        if term.kind not in TRAVELS:
            return cells.rows, keys
        away = self.holders[cells.stages] != self.columns.rank[cells.rows]
        return cells.rows, keys + away * self.numbering.size

    def _whose(self, whose: Whose, rows: Ints) -> _Cells:
        """Return the rows paired with the stages that `whose` selects."""
        columns = self.columns
        if whose is Whose.RANK:
            return _Cells(rows, np.zeros(len(rows), np.int64), columns.rank[rows])
        if whose is Whose.HELD:
            held = Ragged.group(self.holders, np.arange(len(self.holders)), columns.num_ranks)
            at, stages = held.expand(columns.rank[rows])
        elif whose is Whose.NAMED:
            named = Ragged.from_lists(columns.values("stages", rows))
            at, stages = named.expand(np.arange(len(rows)))
            here = self.holders[stages] == columns.rank[rows[at]]
            at, stages = at[here], stages[here]
        else:
            at, stages = np.arange(len(rows)), columns.stage[rows]
            if whose is Whose.BEFORE:
                stages = self.layout.all_before(stages, columns.unit[rows])
                at, stages = at[stages >= 0], stages[stages >= 0]
        return _Cells(rows[at], stages, columns.unit[rows[at]])

    def _skips(self, term: Term, rows: Ints) -> _Cells:
        """Return the skip values that a term selects; a value belongs to the later stage of its hop."""
        layout, columns = self.layout, self.columns
        if not layout.skips:
            return _Cells(rows[:0], rows[:0], rows[:0])
        hops = np.array(layout.skip_hops if term.kind is ValueKind.SKIP else layout.skip_chains, np.int64).reshape(
            -1, 3
        )
        skip, earlier, later = hops.T
        own, other = (earlier, later) if term.whose is Whose.LATER else (later, earlier)
        at, hop = Ragged.group(own, np.arange(len(hops)), len(self.holders)).expand(columns.stage[rows])
        if term.which is Which.SKIP:
            named = [layout.skip_numbers.get(name, ABSENT) for name in columns.values("skip", rows)]
            meant = np.array(named, np.int64)[at] == skip[hop]
            meant &= self.holders[other[hop]] == columns.peer[rows[at]]
            at, hop = at[meant], hop[meant]
        return _Cells(rows[at], later[hop], columns.unit[rows[at]] * len(layout.skips) + skip[hop])

    def _which(self, which: Which, cells: _Cells) -> _Cells:
        """Return the cells expanded to the values that `which` selects, with their numbers."""
        rows, stages, numbers = cells
        layout, columns, buckets = self.layout, self.columns, np.array([b for b, _ in self.layout.reductions], np.int64)
        if which in (Which.UNIT, Which.RANK, Which.SKIP, Which.EVERY_SKIP):
            return cells
        if which is Which.EARLIER:
            return _Cells(rows, stages, numbers - 1)
        if which is Which.GATHERING:
            return _Cells(rows, stages, self.gatherings[rows])
        if which is Which.BUCKET:
            reductions = np.maximum(columns.column("part")[rows], 0)
            return _Cells(rows, stages, reductions * len(layout.buckets) + columns.column("bucket")[rows])
        if which is Which.TIE:
            of_name = {tie.params: tie.number for tie in layout.ties}
            return _Cells(rows, stages, np.array([of_name.get(p, 0) for p in columns.values("params", rows)], np.int64))
        if which is Which.REDUCTION_BEFORE:
            before: Ints = layout.reduction_of[stages, numbers] - 1
            some = before >= 0
            return _each(_Cells(rows[some], stages[some], before[some] * len(layout.buckets)), buckets)
        if which is Which.EVERY_BUCKET:
            return _each(_Cells(rows, stages, np.zeros(len(rows), np.int64)), buckets)
        if which is Which.EVERY_REDUCTION:
            at = np.repeat(np.arange(len(rows)), layout.num_reductions[stages])
            reductions = _count_from_zero(layout.num_reductions[stages])
            return _each(_Cells(rows[at], stages[at], reductions * len(layout.buckets)), buckets)
        if which is Which.EVERY_TIE:
            ties = Ragged.from_lists([tie.number for tie in layout.ties_of(s)] for s in range(len(self.holders)))
            at, numbers = ties.expand(stages)
            return _Cells(rows[at], stages[at], numbers)
        if which is Which.REDUCED_UNITS:
            at, units = layout.reduced_units.expand(stages * layout.most_reductions + columns.column("part")[rows])
        else:
            at, units = layout.units.expand(stages)
        return _Cells(rows[at], stages[at], units)


def _kept(cells: _Cells, which: Flags) -> _Cells:
    return _Cells(*(column[which] for column in cells))


def _each(cells: _Cells, added: Ints) -> _Cells:
    """Return each cell once per entry of `added`, with that entry added to its number."""
    rows, stages, numbers = (np.repeat(column, len(added)) for column in cells)
    return _Cells(rows, stages, numbers + np.tile(added, len(cells.rows)))


def _count_from_zero(lengths: Ints) -> Ints:
    """Return 0, 1, … up to each length (exclusive), concatenated."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


_OF_PLAN: dict[When, Callable[[Layout], bool]] = {
    When.STEPS_SHARDS: lambda layout: layout.zero.shards_optimizer and not layout.zero.shards_weights,
    When.SHARDS_GRADIENTS: lambda layout: layout.zero.shards_gradients,
    When.SHARDS_WEIGHTS: lambda layout: layout.zero.shards_weights,
}
"""Conditions on the whole plan."""

_OF_CELL: dict[When, Callable[[Ints, Ints, Layout], Flags]] = {
    When.NOT_LAST: lambda stages, units, layout: layout.all_after(stages, units) >= 0,
    When.HAS_LOSS: lambda stages, units, layout: layout.have_loss(stages, units),
    When.KEEPS: lambda stages, units, layout: layout.trains & ~layout.recomputing[stages, units],
    When.RECOMPUTES: lambda stages, units, layout: layout.trains & layout.recomputing[stages, units],
    When.STAYS: lambda stages, units, layout: ~layout.fetched[stages, units],
    When.FETCHED: lambda stages, units, layout: layout.fetched[stages, units],
    When.HAS_EARLIER: lambda stages, units, layout: units % layout.slices > 0,
    When.HAS_LATER: lambda stages, units, layout: units % layout.slices < layout.slices - 1,
}
"""Conditions on a stage and a unit."""


def gatherings_of(columns: Columns) -> Ints:
    """Return for each row the number of the gathering of its stage's weights that it makes, uses or ends."""
    stage = columns.stage
    rows = np.flatnonzero(stage >= 0)
    order = rows[np.argsort(stage[rows], kind="stable")]
    gathers = columns.are(ins.GatherParams)[order]
    times = np.cumsum(gathers)
    starts = np.flatnonzero(np.r_[True, np.diff(stage[order]) != 0]) if len(order) else np.zeros(0, np.int64)
    before: Ints = np.repeat(times[starts] - gathers[starts], np.diff(np.r_[starts, len(order)]))
    found = np.zeros(len(columns), np.int64)
    found[order] = np.maximum(times - before - 1, 0)
    return found


def peer_of(message: ins.Message, layout: Layout) -> int:
    """Return the pipeline rank that `message` must name as its peer, or -1 if it has none.

    Activations go to the next stage of the microbatch's route, gradients to the previous one. A skip may go to several
    ranks: the peer is then the one that is named if it is among them, else the first. Lent activations go to the rank
    that its stage's `LendAct` names, and back.
    """
    if isinstance(message, ins.LendAct | ins.ReclaimAct):
        return layout.lent_to.get((message.stage, message.microbatch), ABSENT)
    if isinstance(message, ins.HoldAct | ins.ReturnAct):
        return layout.rank_of(message.stage)
    if isinstance(message, ins.SKIP_MESSAGES):
        peers = _skip_peers(message, layout)
        return message.peer if message.peer in peers else next(iter(peers), ABSENT)
    forward = isinstance(message, ins.SendAct | ins.RecvGrad)
    other = (layout.after if forward else layout.before)(message.stage, message.microbatch)
    return layout.rank_of(other) if other >= 0 else ABSENT


def _skip_peers(message: ins.SkipMessage, layout: Layout) -> list[int]:
    """Return the other ranks with which the stage of a message exchanges the skip that it names."""
    hops = layout.skip_hops if isinstance(message, ins.SendSkip | ins.RecvSkip) else layout.skip_chains
    to_later = isinstance(message, ins.SendSkip | ins.RecvSkipGrad)
    skip, rank = layout.skip_numbers.get(message.skip, ABSENT), layout.rank_of(message.stage)
    ends = [(hop.earlier, hop.later) if to_later else (hop.later, hop.earlier) for hop in hops if hop.skip == skip]
    return [layout.rank_of(other) for own, other in ends if own == message.stage and layout.rank_of(other) != rank]
