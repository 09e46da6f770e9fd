"""Early reductions: a bucket is reduced as soon as the last backward of its stage has filled it, as the runtime does.

    last backward    ▕ layer 3 ▏▕ layer 2 ▏▕ layer 1 ▏▕ layer 0 ▏
    bucket 0 of 2                          ▕ reduced ▏                bucket b of B is full after (b + 1)/B of it
    the same in 2 pieces      ▕ first ▏    ▕ second ▏                 and piece 1 of n after 1/n of the bucket's part

Gradients come evenly over the backward, last layer first; experts' come over all of it. Reductions still run in the
program's order, one after the other. In the event graph, a fraction of a backward is an event of its own, with the
backward's predecessors and that fraction of its time; a bucket's last piece is one, for which others wait as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quintsched.graph.event_graph import EventGraph, Times
from quintsched.graph.events_and_channels import Events
from quintsched.ir.instruction_columns import ABSENT, Columns, Ints
from quintsched.ir.instruction_set import ENDS_BACKWARD, AllReduceBucket, BwdWeight, ReduceScatterBucket, SyncTied
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs


@dataclass(frozen=True, eq=False)
class TimedGraph:
    """Event graph that is timed: its nodes are a plan's events, and behind them parts of events.

    `of[node]` is the event that a node is, or is a part of. `order` is topological.
    """

    graph: EventGraph
    durations: Times
    order: Ints
    of: Ints

    def times(self) -> tuple[Times, Times]:
        """Return the start of each event, and the end of each node; an event ends with the last of its parts."""
        starts = self.graph.starts(self.durations, self.order)
        ends = starts + self.durations
        np.maximum.at(ends, self.of, ends.copy())
        return starts[: self.num_events], ends

    @property
    def num_events(self) -> int:
        """Number of events."""
        return int(self.of.max(initial=-1)) + 1


@dataclass(frozen=True, eq=False)
class _Reductions:
    """Rows of reductions that begin early, and of the backwards that fill their buckets; fractions of these.

    `first` is the fraction after which a bucket's first piece is full, `full` that of the last; `last` is the last
    piece's share of the bucket.
    """

    rows: Ints
    backwards: Ints
    first: Times
    full: Times
    last: Times


def reduce_early(plan: PlanData, events: Events, costs: Costs, timed: TimedGraph) -> TimedGraph:
    """Return the graph in which buckets are reduced as soon as they are full; `timed` has one node per event."""
    found, graph, durations = _reductions(plan, costs), timed.graph, timed.durations
    event, backward = events.of[found.rows], events.of[found.backwards]
    waits_for_it = np.isin(event * graph.num_events + backward, graph.targets * graph.num_events + graph.sources)
    begins, ends = (found.first < 1) & waits_for_it, (found.last < 1) & waits_for_it
    if not (begins | ends).any():
        return timed
    tied = events.of[plan.columns.rows_where(SyncTied)]
    waits = np.full(graph.num_events, ABSENT)
    waits[event[begins]] = backward[begins]
    waited = waits[graph.targets]
    kept = (waited == ABSENT) | ((graph.sources != waited) & ~np.isin(graph.sources, tied))
    firsts, fulls, lasts = np.split(
        graph.num_events + np.arange(begins.sum() + 2 * ends.sum()), [begins.sum(), begins.sum() + ends.sum()]
    )
    parts, wholes = np.r_[firsts, fulls], np.r_[backward[begins], backward[ends]]
    copied, edges = _copies(graph.targets, wholes)
    after, following = _copies(graph.sources, event[ends])
    sources = [graph.sources[kept], graph.sources[edges], firsts, fulls, lasts[after]]
    targets = [graph.targets[kept], parts[copied], event[begins], lasts, graph.targets[following]]
    place = np.empty(graph.num_events)
    place[timed.order] = np.arange(graph.num_events)
    places = np.r_[place, place[wholes] - 0.5, place[event[ends]] + 0.5]
    shares = np.r_[found.first[begins], found.full[ends]]
    sources_of_all, targets_of_all = np.concatenate(sources), np.concatenate(targets)
    return TimedGraph(
        EventGraph(len(places), sources_of_all, targets_of_all, np.zeros(len(sources_of_all), np.int64)),
        np.r_[durations, shares * durations[wholes], found.last[ends] * durations[event[ends]]],
        np.argsort(places, kind="stable"),
        np.r_[timed.of, wholes, event[ends]],
    )


def _copies(ends: Ints, events: Ints) -> tuple[Ints, Ints]:
    """Return (position in `events`, edge) for each edge whose end, of those given, is one of these events."""
    by_end = np.argsort(ends, kind="stable")
    low, high = (np.searchsorted(ends[by_end], events, side) for side in ("left", "right"))
    counts = high - low
    position = np.repeat(np.arange(len(events)), counts)
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return position, by_end[low[position] + offset]


def _reductions(plan: PlanData, costs: Costs) -> _Reductions:
    """Return the reductions that sum what the last backward of a stage adds, if they may begin in it."""
    columns, layout = plan.columns, plan.layout
    rows = columns.rows_where(AllReduceBucket, ReduceScatterBucket)
    if not len(rows):
        return _Reductions(rows, rows, *np.zeros((3, 0)))
    stage, bucket, dense = columns.stage[rows], columns.column("bucket")[rows], plan.buckets_per_stage
    backwards, split = _last_backwards(plan)
    numbers = range(len(plan.stage_to_pp))
    early = np.array([layout.reduces_early(one, split=bool(split[one])) for one in numbers])[stage]
    early &= (_parts(columns, rows) == layout.num_reductions[stage] - 1) & (backwards[stage] != ABSENT)
    tied = np.array([bool(layout.ties_of(one)) for one in numbers])[stage]
    early &= ~tied | (bucket < dense - 1)  # the tied weights are in the last dense bucket
    rows, stage, bucket = rows[early], stage[early], bucket[early]
    pieces = np.array([costs.pieces_of(one) for one in numbers])[stage]
    parts = np.where(bucket < dense, dense, 1)
    place = np.where(bucket < dense, bucket, 0)
    return _Reductions(rows, backwards[stage], (place + 1 / pieces) / parts, (place + 1) / parts, 1 / pieces)


def _parts(columns: Columns, rows: Ints) -> Ints:
    """Return the number of each row's reduction: 0 for an all-reduce."""
    part = columns.columns.get("part")
    return np.zeros(len(rows), np.int64) if part is None else np.maximum(part[rows], 0)


def _last_backwards(plan: PlanData) -> tuple[Ints, Ints]:
    """Return, for each stage, the row of the last backward that adds to its gradients, and whether it is split."""
    apart, origin = plan.columns.apart
    rows = apart.rows_where(*ENDS_BACKWARD)
    last, split = np.full(len(plan.stage_to_pp), ABSENT), np.zeros(len(plan.stage_to_pp), np.int64)
    last[apart.stage[rows]] = origin[rows]  # rows ascend, and a stage is on one rank
    split[apart.stage[rows]] = apart.are(BwdWeight)[rows]
    return last, split
