"""What each event of a plan has to wait for: the events before it in its queues, and those that make its values.

Under `blocking` everything on a rank is in one queue; the other profiles relax that step by step. With no wildcard
receive and no branch, a plan is free of deadlock exactly if the graph of these waits has no cycle. The simulator times
the same graph.

An edge that other edges imply is left out: computations of a rank are in one queue, so of several that an event waits
for, the last is enough, and a computation waits for those before it anyway.
"""

from __future__ import annotations

import numpy as np

from quintsched.graph.event_graph import EventGraph
from quintsched.graph.plan_events import NO_GROUP, Ends, Events, shrunk
from quintsched.graph.profiles import COMPUTE_QUEUE, FIRST_GROUP_QUEUE, NO_QUEUE, Profile
from quintsched.ir.columns import ABSENT, Columns, Flags, Ints
from quintsched.ir.dataflow import Flows
from quintsched.ir.instructions import (
    FetchAct,
    FreeParams,
    GatherParams,
    HostCopy,
    OffloadAct,
    Recv,
    Send,
    ShareMetrics,
    SyncTied,
)

Edges = tuple[Ints, Ints, Ints]
"""(sources, targets, ranks): events, and the rank on which the target waits."""

ISSUED = (Send, Recv, HostCopy, ShareMetrics, SyncTied)
"""What a host only issues: it waits in computations, and at everything else that ends a step."""


def build_graph(events: Events, flows: Flows, profile: Profile, *, one_host: bool = False) -> EventGraph:
    """Return the event graph of a plan under a transport profile; with `one_host`, as a rank's host adds to it.

    That is the graph of a proof; without tags it has the launch order of collectives as well. Without a host, it is the
    one that is timed: of queues and data alone. Under `blocking` a rank's one queue is its program order already.

    A value that no instruction of its own rank makes comes from the rank that makes it: so the graph of a plan
    without messages, as a schedule yields it, has the right edges too.
    """
    queues = profile.queues(events)
    parts = [queue_edges(events, queues)]
    if not profile.one_queue:
        parts += [data_edges(events, flows, queues), room_edges(events, queues)]
        if one_host:
            parts += [host_edges(events, profile), *([] if profile.matches_by_tag else [launch_edges(events)])]
    sources, targets, ranks = (np.concatenate(part) for part in zip(*parts, strict=True))
    return EventGraph(events.num_events, sources, targets, ranks)


def host_edges(events: Events, profile: Profile) -> Edges:
    """Return what a host adds that issues its program in order, and waits as it goes.

    It waits in computations and at what ends a step. Messages and other collectives it only issues, but not before it
    has come to them; where tags match messages, those are issued ahead of their place and wait for nobody.
    """
    columns = events.columns
    issued = columns.are(*ISSUED)
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
    """Return the edges from every collective of a rank to the next one, whatever their groups.

    NCCL may run the collectives of a GPU one at a time, in the order of their launch: one whose group is not complete
    holds up all behind it. So ranks that share two groups issue their collectives in one order, and no circle leads
    through three groups or more.
    """
    columns = events.columns
    rows = np.flatnonzero(events.groups != NO_GROUP)
    earlier, later = rows[:-1], rows[1:]
    same = columns.rank[earlier] == columns.rank[later]
    return events.of[earlier[same]], events.of[later[same]], columns.rank[later[same]]


def queue_edges(events: Events, queues: Ints) -> Edges:
    """Return the edges from every event to the next one in its queue on a rank; `queues` are those of the rows."""
    columns, found = events.columns, []
    computing = np.flatnonzero(queues == COMPUTE_QUEUE)
    parts = [(computing, columns.rank[computing])]
    rest = (queues != COMPUTE_QUEUE) & (queues != NO_QUEUE)
    for ends in (events.channels.sends, events.channels.receives):
        if _has_own_queues(ends, queues):  # then they are sorted already
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
    """Whether every channel has a queue to itself."""
    used = np.flatnonzero(ends.counts)
    names = queues[ends.rows[ends.starts[used]]]
    return bool(names.min(initial=FIRST_GROUP_QUEUE) >= FIRST_GROUP_QUEUE) and len(np.unique(names)) == len(names)


def all_data_edges(events: Events, flows: Flows) -> Edges:
    """Return the edges from every event that makes a value to every one that consumes or reads it."""
    makers, rows = _handovers(flows)
    return events.of[makers], events.of[rows], events.columns.rank[rows]


def data_edges(events: Events, flows: Flows, queues: Ints) -> Edges:
    """Return those of them that the order of computations does not imply; `queues` are those of the rows."""
    rank = events.columns.rank
    makers, rows = _last_of_queue(*_handovers(flows), rank, queues == COMPUTE_QUEUE)
    return events.of[makers], events.of[rows], rank[rows]


def _handovers(flows: Flows) -> tuple[Ints, Ints]:
    """Return (makers, takers): the rows that make a value, and those that consume or read it."""
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
    """Return the edges without those that the order of computations implies."""
    ordered = computing[makers] & (rank[makers] == rank[rows]) & (makers < rows)
    kept = ~ordered
    outside = np.flatnonzero(ordered & ~computing[rows])
    last = np.full(len(rank), ABSENT)
    np.maximum.at(last, rows[outside], makers[outside])
    kept[outside] = last[rows[outside]] == makers[outside]
    return makers[kept], rows[kept]


def room_edges(events: Events, queues: Ints) -> Edges:
    """Return the edges from what frees memory to what takes it after that; `queues` are those of the rows.

        FreeParams ──▶ GatherParams      OffloadAct ──▶ the next computation, FetchAct      computation ──▶ FetchAct

    Weights are gathered into the room of others. A computation finds the room that activations had which went to the
    host's memory before it, and those that are fetched take the room that what stands before them has left.
    """
    columns = events.columns
    pairs = [_latest_before(columns, columns.rows_where(FreeParams), columns.rows_where(GatherParams))]
    offloads, fetches = columns.rows_where(OffloadAct), columns.rows_where(FetchAct)
    if len(offloads) or len(fetches):
        computing = np.flatnonzero(queues == COMPUTE_QUEUE)
        freed, taken = _latest_before(columns, offloads, computing)
        first = np.diff(freed, prepend=ABSENT) != 0
        pairs.append((freed[first], taken[first]))
        pairs += [_latest_before(columns, before, fetches) for before in (offloads, computing)]
    sources, targets = (np.concatenate(rows) for rows in zip(*pairs, strict=True))
    return events.of[sources], events.of[targets], columns.rank[targets]


def _latest_before(columns: Columns, earlier: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return, for each of the rows that has one, the latest of the earlier ones on its rank, and the row."""
    latest = np.searchsorted(earlier, rows) - 1
    known = latest >= 0
    known[known] = columns.rank[earlier[latest[known]]] == columns.rank[rows[known]]
    return earlier[latest[known]], rows[known]
