"""Receive and send buffers for messages of a rank: lifetimes as intervals, their maximum overlap, and an assignment.

    program     RecvAct 0  Fwd 0  RecvAct 1  Fwd 1  RecvGrad 0  Bwd 0  RecvAct 2  Fwd 2  RecvGrad 1  Bwd 1   …
    slot 0      ├─ input 0, kept for its backward ────────────────────┤├─ input 2 ──────────────────────────
    slot 1                        ├─ input 1 ────────────────────────────────────────────────────────────┤
    slot 2                                          ├─ grad 0 ────────┤                  ├─ grad 1 ──────┤

A receive slot is a buffer, needed from the posting of the receive to the end of the last instruction that may read
it: a forward keeps its input for its backward, and the input half of a backward keeps input and gradient for the weight
half. A send slot is an output that is alive only because its send is in flight. All messages count as equal in size,
so that they share a rank's slots; the runtime shares slots among tensors of the same shape and type.

Two overlapping intervals conflict. Giving each interval, in order of start, the lowest free number needs as many slots
as are alive at once at the peak, which is the minimum (colouring of an interval graph).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from quintsched.graph.transport_ordering_rules import TransportProfile
from quintsched.ir.dataflow_analysis import Uses
from quintsched.ir.instruction_columns import ABSENT, Columns, Flags, Ints
from quintsched.ir.instruction_set import LOANS, LendAct, Message, OffloadAct, Recv, Send
from quintsched.ir.instruction_values import Value, ValueKind
from quintsched.ir.plan_data import PlanData
from quintsched.ir.ragged import Ragged

AHEAD = 2
"""Number of receives of a stage's activations, and of its gradients, in flight if they are posted ahead."""

MAX_SENDS = 4
"""Maximum number of sends in flight on a channel; the next send first waits for the oldest of them.

That wait is free of deadlock only for plans that are so under the `blocking` profile; other plans wait for no send.
"""

FRESH = frozenset(
    {
        ValueKind.OUTPUT,
        ValueKind.OUTPUT_GRAD,
        ValueKind.SKIP,
        ValueKind.SKIP_GRAD,
        ValueKind.LOSS,
        ValueKind.WEIGHT_GRAD,
        ValueKind.REDUCED,
        ValueKind.METRICS,
        ValueKind.NORM,
        ValueKind.TIED,
        ValueKind.KEYS,
        ValueKind.KEYS_GRAD,
        ValueKind.PARAMS,
        ValueKind.STEPPED,
        ValueKind.OFFLOADED,
        ValueKind.FETCHED,
        ValueKind.LOAN,
        ValueKind.LENT,
    }
)
"""Kinds of values with memory of their own; but a skip that is passed on shares the memory of the received one."""

KEEPS = tuple(kind for kind in ValueKind if kind not in FRESH)
"""Kinds of values that keep alive the memory of the inputs of the instruction that produced them."""


@dataclass(frozen=True)
class MessageRule:
    """Rule by which messages are posted and awaited.

    Attributes:
        ahead: number of receives in flight of values that differ only in their microbatch (or a function that returns
            it for a value): each receive is posted when the value `ahead` places before it was consumed. Sends are
            issued as soon as their value exists. None: receives and sends keep their places in the program.
        max_sends: maximum number of sends in flight on a channel; None: any number.
    """

    ahead: int | Callable[[Value], int] | None = None
    max_sends: int | None = MAX_SENDS

    @classmethod
    def from_profile(cls, profile: TransportProfile, *, may_wait: bool) -> MessageRule:
        """Return the runtime's rule on a transport; `may_wait`: the plan is free of deadlock under `blocking`."""
        return cls(AHEAD if profile.matches_by_tag else None, MAX_SENDS if may_wait else None)


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Lifetimes of message buffers, one entry per message in `rows`.

    A buffer is needed from before the instruction in row `first` to the end of that in row `last`. `places` are the
    places (in the data flow) of the values that the messages carry.
    """

    rows: Ints
    places: Ints
    first: Ints
    last: Ints

    def of_rank(self, columns: Columns, rank: int) -> Lifetimes:
        """Return the lifetimes of one pp rank, with positions in its program instead of rows."""
        rows = columns.rows_of(rank)
        mine = slice(*np.searchsorted(self.rows, (rows.start, rows.stop)))
        first, last = self.first[mine] - rows.start, self.last[mine] - rows.start
        return Lifetimes(self.rows[mine] - rows.start, self.places[mine], first, last)

    def num_slots(self, columns: Columns) -> tuple[int, ...]:
        """Return each pp rank's maximum number of buffers needed at once."""
        change = np.zeros(len(columns) + columns.num_ranks, np.int64)
        rank = columns.rank[self.rows]
        np.add.at(change, self.first + rank, 1)
        np.subtract.at(change, self.last + rank + 1, 1)  # one extra entry per rank, for buffers alive at its end
        ends = columns.first + np.arange(columns.num_ranks + 1)
        counts = [change[begin:end] for begin, end in pairwise(ends.tolist())]
        return tuple(int(np.cumsum(of_rank).max(initial=0)) for of_rank in counts)


class MessageSlots(NamedTuple):
    """Number of receive and send slots of each pp rank, for messages of equal shapes."""

    receive: tuple[int, ...]
    send: tuple[int, ...]


def message_slots(plan: PlanData, rule: MessageRule) -> MessageSlots:
    """Return the number of slots of each pp rank of a sound plan."""
    receives, sends = receive_lifetimes(plan, rule), send_lifetimes(plan, rule)
    return MessageSlots(receives.num_slots(plan.columns), sends.num_slots(plan.columns))


def receive_lifetimes(plan: PlanData, rule: MessageRule) -> Lifetimes:
    """Return the lifetimes of the receive buffers of a sound plan."""
    rows, places = _messages(plan, plan.flows.produces, Recv)
    taken = plan.flows.first_takers[places]
    first = rows if rule.ahead is None else _posted(plan, rule.ahead, rows, places, taken)
    return Lifetimes(rows, places, first, _let_go(plan)[places])


def send_lifetimes(plan: PlanData, rule: MessageRule) -> Lifetimes:
    """Return the lifetimes of outputs whose sends are in flight, for a sound plan.

    The send of an activation is known to be complete when the corresponding gradient comes back; any other send, at the
    latest, when `max_sends` later ones on its channel are to start, or at the end of the program.
    """
    columns, flows = plan.columns, plan.flows
    rows, places = _messages(plan, flows.consumes, Send)
    first = rows if rule.ahead is None else flows.first_makers[places] + 1
    last = columns.first[columns.rank[rows] + 1] - 1
    answered, answer = _answers(plan, flows.keys(places))
    last = np.where(answered, answer, last)
    if rule.max_sends is not None:
        order, begins = _grouped(columns.rank[rows], columns.peer[rows])
        later = np.arange(len(rows)) + rule.max_sends
        inside = later < len(rows)
        inside[inside] = begins[later[inside]] == begins[inside]
        last[order[inside]] = np.minimum(last[order[inside]], rows[order[later[inside]]] - 1)
    return Lifetimes(rows, places, first, last)


def assign_slots(first: Sequence[int], last: Sequence[int]) -> list[int]:
    """Return a slot for each interval (ends included), with as few slots as possible; overlapping ones differ."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    found = [0] * len(first)
    for begin, index in sorted(zip(first, range(len(first)), strict=True)):
        while busy and busy[0][0] < begin:
            heappush(free, heappop(busy)[1])
        found[index] = heappop(free) if free else len(busy)
        heappush(busy, (last[index], found[index]))
    return found


def _messages(plan: PlanData, uses: Uses, kind: type[Message]) -> tuple[Ints, Ints]:
    """Return the rows of messages of a kind, in order, and the place of the value that each carries.

    Lent activations are not among them: they are no tensors of the sizes that stages exchange, and take no slots.
    """
    carries = plan.columns.are(kind) & ~plan.columns.are(*LOANS)
    mine = np.flatnonzero(carries[uses.rows])
    mine = mine[np.argsort(uses.rows[mine], kind="stable")]
    return uses.rows[mine], uses.places[mine]


def _posted(plan: PlanData, ahead: int | Callable[[Value], int], rows: Ints, places: Ints, taken: Ints) -> Ints:
    """Return the rows before which receives are posted, ahead of their own rows."""
    columns, flows = plan.columns, plan.flows
    names = _Names.from_keys(plan, flows.keys(places))
    order, begins = _grouped(columns.rank[rows], columns.peer[rows], names.kinds, names.stages, names.lanes)
    first, alike = np.unique(begins, return_inverse=True)
    if callable(ahead):
        in_flight = np.array([ahead(flows.value_at(int(place))) for place in places[order[first]]], np.int64)[alike]
    else:
        in_flight = np.full(len(rows), ahead)
    before = np.arange(len(rows)) - in_flight
    waits = before >= begins
    early = columns.first[columns.rank[rows[order]]]
    early[waits] = taken[order[before[waits]]] + 1
    found = np.empty_like(rows)
    found[order] = np.minimum(early, rows[order])
    return found


def _grouped(*names: Ints) -> tuple[Ints, Ints]:
    """Return an order that groups entries with the same names, and for each entry the start of its group in it."""
    order = np.lexsort(names)
    is_new = np.zeros(len(order), np.bool_)
    is_new[:1] = True
    for name in names:
        is_new[1:] |= np.diff(name[order]) != 0
    return order, np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))


def _let_go(plan: PlanData) -> Ints:
    """Return, for the value at each place, the last row that keeps its memory alive.

    That is its consumer. If the consumer produces a value of the same microbatch that keeps its inputs alive, it is the
    last row of that value instead. A forward whose activations are offloaded or lent keeps none: it was copied. A skip
    that is passed on shares the memory of the received one. A forward-only plan keeps nothing alive.
    """
    flows = plan.flows
    if not plan.layout.trains:
        return flows.first_takers
    made, taken = flows.produces, flows.consumes
    of_made, of_taken = (
        _Names.from_keys(plan, flows.keys(made.places)),
        _Names.from_keys(plan, flows.keys(taken.places)),
    )
    units = plan.layout.num_microbatches
    codes = [uses.rows * units + names.units for uses, names in ((made, of_made), (taken, of_taken))]
    keeps = np.isin(of_made.kinds, KEEPS)
    takers = flows.first_takers[made.places]
    keeps &= (takers == ABSENT) | ~plan.columns.are(OffloadAct, LendAct)[takers]
    pairs = [_pairs(made.places[keeps], codes[0][keeps], taken.places, codes[1])]
    if plan.skips:
        left, given = of_made.kinds == ValueKind.SKIP, of_taken.kinds == ValueKind.SKIP
        codes = [code * len(plan.skips) + names.lanes for code, names in zip(codes, (of_made, of_taken), strict=True)]
        pairs.append(_pairs(made.places[left], codes[0][left], taken.places[given], codes[1][given]))
    keeping, values = (np.concatenate(column) for column in zip(*pairs, strict=True))
    last = flows.first_takers.copy()
    while (last[values] < last[keeping]).any():
        np.maximum.at(last, values, last[keeping])
    return last


def _pairs(makers: Ints, of_makers: Ints, others: Ints, of_others: Ints) -> tuple[Ints, Ints]:
    """Return the pairs (maker, other) with equal codes."""
    names, groups = np.unique(of_makers, return_inverse=True)
    group = np.searchsorted(names, of_others)
    known = np.flatnonzero(group < len(names))
    known = known[names[group[known]] == of_others[known]]
    at, found = Ragged.group(groups, makers, len(names)).expand(group[known])
    return found, others[known[at]]


class _Names(NamedTuple):
    """Kinds, stages, microbatches of values, and `lanes`: a number where a microbatch has several of a kind."""

    kinds: Ints
    stages: Ints
    units: Ints
    lanes: Ints

    @classmethod
    def from_keys(cls, plan: PlanData, keys: Ints) -> _Names:
        """Return the names of values; meaningless for kinds that are not per microbatch."""
        numbering = plan.flows.numbering
        counts = np.maximum([numbering.counts[kind] for kind in ValueKind], 1)
        lanes = np.maximum(counts // plan.layout.num_microbatches, 1)
        kinds = np.searchsorted(numbering.firsts, keys, side="right") - 1
        stages, numbers = np.divmod(keys - numbering.firsts[kinds], counts[kinds])
        return cls(kinds, stages, *np.divmod(numbers, lanes[kinds]))


def _answers(plan: PlanData, keys: Ints) -> tuple[Flags, Ints]:
    """Return a mask of sent values whose gradient comes back by a receive, and the row that consumes the gradient.

    Its consumer waits for the gradient, which cannot come before the activation has arrived.
    """
    columns, flows, names = plan.columns, plan.flows, _Names.from_keys(plan, keys)
    is_output = names.kinds == ValueKind.OUTPUT
    gradients = flows.numbering.keys(ValueKind.OUTPUT_GRAD, names.stages * is_output, names.units * is_output)
    makers, takers = flows.first_makers[gradients], flows.first_takers[gradients]
    answered = is_output & (makers != ABSENT)
    answered[answered] = columns.are(Recv)[makers[answered]]
    return answered, takers
