"""Events of a plan: a send and its receive are one event, and so are the collectives of a group that match.

rank 0   Fwd ──▶ SendAct ┐
                         ├─ one event
rank 1           RecvAct ┘ ──▶ Fwd
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quintsched.ir.instruction_columns import ABSENT, Columns, Ints
from quintsched.ir.instruction_set import LOANS, WHOLE_MESH, Recv, Send, SyncTied
from quintsched.ir.instruction_values import ValueKind
from quintsched.ir.plan_data import PlanData

NO_GROUP = -1


@dataclass(frozen=True, eq=False)
class Ends:
    """Sends, or receives, of all channels, sorted by channel, and by program order within each.

    `counts[c]` is their number on channel c; `numbers` counts from 0 on each channel.
    """

    rows: Ints
    channels: Ints
    counts: Ints

    @cached_property
    def starts(self) -> Ints:
        """Offset of each channel's first end."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def numbers(self) -> Ints:
        """Position of each end on its channel."""
        return np.arange(len(self.rows)) - self.starts[self.channels]


@dataclass(frozen=True, eq=False)
class Channels:
    """Channels of a plan's messages. Channel c goes from pipeline rank `sources[c]` to `destinations[c]`."""

    sources: Ints
    destinations: Ints
    sends: Ends
    receives: Ends

    @classmethod
    def from_columns(cls, columns: Columns) -> Channels:
        """Find the channel of every message, and its position there."""
        num_ranks = columns.num_ranks
        sent, received = columns.rows_where(Send), columns.rows_where(Recv)
        of_sends = columns.rank[sent] * num_ranks + columns.peer[sent]
        of_receives = columns.peer[received] * num_ranks + columns.rank[received]
        names = np.union1d(_distinct(of_sends), _distinct(of_receives))
        ends = []
        for rows, of_rows in ((sent, of_sends), (received, of_receives)):
            number = np.searchsorted(names, of_rows)
            order = np.argsort(shrunk(number), kind="stable")
            counts = np.bincount(number, minlength=len(names))
            ends.append(Ends(rows[order], number[order], counts))
        return cls(*np.divmod(names, num_ranks), *ends)

    @property
    def num_channels(self) -> int:
        """Number of channels: directed pairs of ranks that exchange messages."""
        return len(self.sources)

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """Rows of the k-th send and of the k-th receive of a channel, for all k that have both."""
        both = np.minimum(self.sends.counts, self.receives.counts)
        sent = self.sends.numbers < both[self.sends.channels]
        received = self.receives.numbers < both[self.receives.channels]
        return self.sends.rows[sent], self.receives.rows[received]

    def uneven(self) -> list[int]:
        """Channels with unequal numbers of sends and receives."""
        return np.flatnonzero(self.sends.counts != self.receives.counts).tolist()


def _distinct(values: Ints) -> Ints:
    """Return the distinct values, quickly for values that come in long runs."""
    changes = np.flatnonzero(np.diff(values)) + 1
    return np.unique(values[np.r_[0, changes]]) if len(values) else values


def shrunk(numbers: Ints) -> Ints:
    """Return non-negative numbers as 16-bit integers if they fit: numpy sorts those in linear time."""
    return numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers


def pipeline_collectives(plan: PlanData) -> dict[tuple[int, ...], dict[int, list[int]]]:
    """Return the rows of collectives in program order, per group of pipeline ranks and per rank.

    A sum over stages that are all on one rank is left out: it involves no other rank.
    """
    columns = plan.columns
    of_all: dict[int, list[int]] = {}
    found: dict[tuple[int, ...], dict[int, list[int]]] = {tuple(range(columns.num_ranks)): of_all}
    rows = columns.rows_where(*WHOLE_MESH, SyncTied)
    tied = columns.are(SyncTied)[rows].tolist()
    for row, rank, is_tied in zip(rows.tolist(), columns.rank[rows].tolist(), tied, strict=True):
        issued = of_all
        if is_tied:
            members = plan.layout.ranks_of(columns.values("stages", np.array([row]))[0])
            if len(members) == 1:
                continue
            issued = found.setdefault(members, {})
        issued.setdefault(rank, []).append(row)
    return found


@dataclass(frozen=True, eq=False)
class Events:
    """Map of rows to events: `of[row]` is the event's number; numbers are dense, in the order of their first rows.

    `groups[row]` is the number of a collective's group of pipeline ranks; `NO_GROUP` for all other rows.
    """

    columns: Columns
    channels: Channels
    groups: Ints
    of: Ints
    first_rows: Ints

    @classmethod
    def merge(cls, plan: PlanData) -> Events:
        """Merge the k-th send of a channel with its k-th receive, and the k-th collectives of a group.

        Unmatched instructions are events of their own; `check` reports them before it calls this. Plans cache it.
        """
        return plan.remember("events", lambda: cls._merge(plan))

    @classmethod
    def _merge(cls, plan: PlanData) -> Events:
        columns = plan.columns
        channels = Channels.from_columns(columns)
        leader = np.arange(len(columns))
        sent, received = channels.pairs
        leader[sent] = leader[received] = np.minimum(sent, received)
        groups = np.full(len(columns), NO_GROUP)
        for number, (members, issued) in enumerate(pipeline_collectives(plan).items()):
            for together in zip(*(issued.get(rank, ()) for rank in members), strict=False):
                leader[list(together)] = min(together)
            for rows in issued.values():
                groups[rows] = number
        leads = leader == np.arange(len(columns))
        return cls(columns, channels, groups, (np.cumsum(leads) - 1)[leader], np.flatnonzero(leads))

    @classmethod
    def apart(cls, plan: PlanData) -> Events:
        """Return events of one instruction each, without merging."""
        merged, rows = cls.merge(plan), np.arange(len(plan.columns))
        return cls(merged.columns, merged.channels, merged.groups, rows, rows)

    @property
    def num_events(self) -> int:
        """Number of events."""
        return len(self.first_rows)

    def member(self, event: int, rank: int) -> int:
        """Return the event's row on `rank`, or else its first row."""
        rows = np.flatnonzero(self.of == event)
        here = rows[self.columns.rank[rows] == rank]
        return int(here[0] if len(here) else rows[0])


def carried(plan: PlanData, rows: Ints) -> Ints:
    """Return the key of the value that each message carries: consumed by a send, produced by its receive.

    Saved activations that are lent have other names on both ends: a message carries them as what the holder keeps.
    """
    columns, key_of = plan.columns, np.full(len(plan.columns), ABSENT)
    for uses in (plan.flows.produces, plan.flows.consumes):
        key_of[uses.rows] = uses.places
    found = plan.flows.keys(key_of[rows])
    lent = columns.are(*LOANS)[rows]
    cells = columns.stage[rows[lent]], columns.unit[rows[lent]]
    found[lent] = plan.flows.numbering.keys(ValueKind.LENT, *cells)
    return found
