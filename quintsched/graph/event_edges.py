"""Dependency edges between the events of a plan: order within queues, data flow, memory, and the host's order.

Under `blocking` all instructions of a rank are in one queue; the other profiles relax that step by step. Without
wildcard receives and branches, a plan is free of deadlock exactly if this graph has no cycle. The simulator times the
same graph.

Edges that others imply are left out. The computations of a rank are in one queue: so of several computations that
an event waits for, the last is enough, and a computation needs no edge from earlier ones.
"""

from __future__ import annotations

import numpy as np

from quintsched.graph.event_graph import EventGraph
from quintsched.graph.events_and_channels import NO_GROUP, Ends, Events, shrunk
from quintsched.graph.transport_ordering_rules import COMPUTE_QUEUE, FIRST_GROUP_QUEUE, NO_QUEUE, TransportProfile
from quintsched.ir.dataflow_analysis import Flows
from quintsched.ir.instruction_columns import ABSENT, Columns, Flags, Ints
from quintsched.ir.instruction_set import (
    AMONG_REPLICAS,
    BEGINS_BACKWARD,
    ENDS_BACKWARD,
    LOANS,
    FetchAct,
    FreeParams,
    GatherParams,
    HoldAct,
    HostCopy,
    LendAct,
    OffloadAct,
    Overlap,
    ReclaimAct,
    Recv,
    ReduceScatterBucket,
    ReturnAct,
    Send,
    ShareMetrics,
    SyncTied,
)

Edges = tuple[Ints, Ints, Ints]
"""(sources, targets, ranks): event ids, and the rank on which the target waits."""

ISSUED = (Send, Recv, HostCopy, ShareMetrics, SyncTied)
"""Instructions that the host issues asynchronously, except for `LOANS`: it blocks in these, as in computations and in
all instructions that end a step, since the holder of a loan learns its size from a message."""


def build_graph(
    events: Events, flows: Flows, profile: TransportProfile, *, one_host: bool = False, frees_gradients: bool = False
) -> EventGraph:
    """Return the event graph of a plan under a transport profile; with `one_host`, edges of a rank's host are added.

    With `one_host` it is the graph of the proof; unless messages match by tag, it then has the launch order of
    collectives too. Without, it is the graph that is timed: queues, data and memory. Under `blocking` a rank's one
    queue is its program order already. `frees_gradients`: full gradients are freed after each reduction (ZeRO-2, 3).

    A value that no instruction on its rank produces comes from the rank that produces it. So a plan without messages,
    as a schedule yields it, gets the right edges too.
    """
    queues = profile.queues(events)
    parts = [queue_edges(events, queues)]
    if not profile.one_queue:
        parts += [data_edges(events, flows, queues), room_edges(events, queues, frees_gradients)]
        if one_host:
            parts += [host_edges(events, profile), *([] if profile.matches_by_tag else [launch_edges(events)])]
    sources, targets, ranks = (np.concatenate(part) for part in zip(*parts, strict=True))
    return EventGraph(events.num_events, sources, targets, ranks)


def host_edges(events: Events, profile: TransportProfile) -> Edges:
    """Return the edges of a host that issues its program in order and blocks in some instructions.

    It blocks in computations, in messages of lent activations and in instructions that end a step. It issues other
    messages and collectives without blocking, but not before it reaches them; messages that match by tag are issued
    ahead of their place.
    """
    columns = events.columns
    issued = columns.are(*ISSUED) & ~columns.are(*LOANS)
    waits = np.flatnonzero(~issued)
    same = columns.rank[waits[:-1]] == columns.rank[waits[1:]]
    sources, targets = [waits[:-1][same]], [waits[1:][same]]
    later = np.flatnonzero(issued & ~(columns.are(Send, Recv) & profile.matches_by_tag))
    before = np.searchsorted(waits, later) - 1
    later, before = later[before >= 0], waits[before[before >= 0]]
    same = columns.rank[before] == columns.rank[later]
    sources.append(before[same])
    targets.append(later[same])
    rows = np.concatenate(sources)
    return events.of[rows], events.of[np.concatenate(targets)], columns.rank[rows]


def launch_edges(events: Events) -> Edges:
    """Return the edges from every collective of a rank to its next one, across groups.

    NCCL may run the collectives of a GPU one at a time, in launch order: one whose group is incomplete holds up all
    later ones. So ranks that share two groups must issue their collectives in one order, and no cycle may lead through
    three groups or more. Collectives among replicas are launched in that order, too: one waits for a sum over pipeline
    ranks that the rank has launched before it.
    """
    columns = events.columns
    rows = np.flatnonzero((events.groups != NO_GROUP) | columns.are(*AMONG_REPLICAS))
    earlier, later = rows[:-1], rows[1:]
    same = columns.rank[earlier] == columns.rank[later]
    return events.of[earlier[same]], events.of[later[same]], columns.rank[later[same]]


def queue_edges(events: Events, queues: Ints) -> Edges:
    """Return the edges from every event to the next in its queue on a rank; `queues` has the queue of each row."""
    columns, found = events.columns, []
    computing = np.flatnonzero(queues == COMPUTE_QUEUE)
    parts = [(computing, columns.rank[computing])]
    rest = (queues != COMPUTE_QUEUE) & (queues != NO_QUEUE)
    for ends in (events.channels.sends, events.channels.receives):
        if _has_own_queues(ends, queues):  # then already sorted by queue
            parts.append((ends.rows, ends.channels))
            rest[ends.rows] = False
    others = np.flatnonzero(rest)
    lines = columns.rank[others] * (queues.max(initial=0) + 1) + queues[others]
    order = np.argsort(shrunk(lines), kind="stable")
    parts.append((others[order], lines[order]))
    for rows, line in parts:
        same = line[:-1] == line[1:]
        found.append((rows[:-1][same], rows[1:][same]))
    earlier, later = (np.concatenate(column) for column in zip(*found, strict=True))
    return events.of[earlier], events.of[later], columns.rank[earlier]


def _has_own_queues(ends: Ends, queues: Ints) -> bool:
    """Return whether every channel has a queue of its own."""
    used = np.flatnonzero(ends.counts)
    names = queues[ends.rows[ends.starts[used]]]
    return bool(names.min(initial=FIRST_GROUP_QUEUE) >= FIRST_GROUP_QUEUE) and len(np.unique(names)) == len(names)


def all_data_edges(events: Events, flows: Flows) -> Edges:
    """Return the edges from the producer of a value to all its consumers and readers."""
    makers, rows = _handovers(flows)
    return events.of[makers], events.of[rows], events.columns.rank[rows]


def data_edges(events: Events, flows: Flows, queues: Ints) -> Edges:
    """Return the data edges that the order of computations does not imply; `queues` has the queue of each row."""
    rank = events.columns.rank
    makers, rows = _last_of_queue(*_handovers(flows), rank, queues == COMPUTE_QUEUE)
    return events.of[makers], events.of[rows], rank[rows]


def _handovers(flows: Flows) -> tuple[Ints, Ints]:
    """Return (makers, takers): rows that produce a value, and rows that consume or read it."""
    rows = np.concatenate([flows.consumes.rows, flows.reads.rows])
    places = np.concatenate([flows.consumes.places, flows.reads.places])
    makers = flows.first_makers[places]
    absent = np.flatnonzero(makers == ABSENT)
    keys = flows.keys(places[absent])
    travels = keys < flows.numbering.num_travelling
    makers[absent[travels]] = flows.first_senders[keys[travels]]
    known = makers != ABSENT
    return makers[known], rows[known]


def _last_of_queue(makers: Ints, rows: Ints, rank: Ints, computing: Flags) -> tuple[Ints, Ints]:
    """Return the edges without those that the order of computations on a rank implies."""
    ordered = computing[makers] & (rank[makers] == rank[rows]) & (makers < rows)
    kept = ~ordered
    outside = np.flatnonzero(ordered & ~computing[rows])
    last = np.full(len(rank), ABSENT)
    np.maximum.at(last, rows[outside], makers[outside])
    kept[outside] = last[rows[outside]] == makers[outside]
    return makers[kept], rows[kept]


def room_edges(events: Events, queues: Ints, frees_gradients: bool) -> Edges:
    """Return the edges from rows that free memory to later rows that allocate it; `queues` has the queue of each row.

        FreeParams ──▶ GatherParams      OffloadAct ──▶ the next computation, FetchAct      computation ──▶ FetchAct
        ReduceScatterBucket ──▶ the next backward, GatherParams              if `frees_gradients`

    Full weights are gathered into memory that other weights have left. A computation uses the memory of activations
    offloaded before it; fetched activations use the memory that all before them on the rank have left. Lent and
    returned ones leave memory as offloaded ones do, held and reclaimed ones take it as fetched ones. Full gradients are
    resident up to the end of their reduction.
    """
    columns = events.columns
    gathers = columns.rows_where(GatherParams)
    pairs = [_latest_before(columns, columns.rows_where(FreeParams), gathers)]
    if frees_gradients:
        backwards = columns.rows_where(*BEGINS_BACKWARD, *ENDS_BACKWARD, Overlap)
        pairs.append(_latest_before(columns, columns.rows_where(ReduceScatterBucket), np.union1d(backwards, gathers)))
    pairs += _activation_room(columns, np.flatnonzero(queues == COMPUTE_QUEUE))
    sources, targets = (np.concatenate(rows) for rows in zip(*pairs, strict=True))
    return events.of[sources], events.of[targets], columns.rank[targets]


def _activation_room(columns: Columns, computing: Ints) -> list[tuple[Ints, Ints]]:
    """Return the pairs of `room_edges` for activations that leave the memory of a rank, and come to it.

    What a rank holds for another counts from the start of the computation before its `HoldAct`: so the lender does not
    wait for the end of that computation.
    """
    freed = columns.rows_where(OffloadAct, LendAct, ReturnAct)
    taking = columns.rows_where(FetchAct, HoldAct, ReclaimAct)
    if not len(freed) and not len(taking):
        return []
    taken = np.where(columns.are(HoldAct)[taking], columns.computation_before(taking), taking)
    order = np.argsort(taken, kind="stable")
    taken, taking = taken[order], taking[order]
    latest = np.searchsorted(computing, taken) - 1
    since = np.where(latest >= 0, computing[latest], 0) if len(computing) else np.zeros(len(taken), np.int64)
    begins = np.searchsorted(freed, np.maximum(since, columns.first[columns.rank[taking]]))
    lengths = np.maximum(np.searchsorted(freed, taken) - begins, 0)
    between = np.arange(int(lengths.sum())) + np.repeat(begins - np.cumsum(lengths) + lengths, lengths)
    following = np.searchsorted(computing, freed, side="right")
    return [
        _on_one_rank(columns, freed, computing, following),
        (freed[between], np.repeat(taking, lengths)),
        _on_one_rank(columns, taking, computing, latest)[::-1],
    ]


def _on_one_rank(columns: Columns, rows: Ints, others: Ints, places: Ints) -> tuple[Ints, Ints]:
    """Return (row, the row of `others` at its place) for those that are on one rank."""
    known = (places >= 0) & (places < len(others))
    known[known] = columns.rank[others[places[known]]] == columns.rank[rows[known]]
    return rows[known], others[places[known]]


def _latest_before(columns: Columns, earlier: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return (latest earlier row on the same rank, row) for each of the rows that has one."""
    latest = np.searchsorted(earlier, rows) - 1
    known = latest >= 0
    known[known] = columns.rank[earlier[latest[known]]] == columns.rank[rows[known]]
    return earlier[latest[known]], rows[known]
