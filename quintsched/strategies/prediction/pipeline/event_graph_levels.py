"""Vectorized simulation of one order of computation under many cost models: its event graph, level by level.

    level   0    1     2     3     4            an event's level is the length of the longest path to it, in events;
    rank 0  F0   F1 ─▶ F2 ─▶ …                  events of one level depend only on earlier levels, so that one numpy
             ╲    ╲                             operation times them all, with one column per cost model
    rank 1        m0 ─▶ F0 ─▶ B0 …

Dependencies and results are those of the simulator (one queue for each rank's computations and for each directed
channel); the order is compiled without proof, reductions and optimizer. Orders and their levels are cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from quintsched.graph.blocking_transport import meeting_order
from quintsched.graph.event_edges import build_graph
from quintsched.graph.event_graph import Times
from quintsched.graph.events_and_channels import Events
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_columns import Ints
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Fwd
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import PlanData
from quintsched.passes.place_messages import place_messages
from quintsched.schedules import find_schedule
from quintsched.schedules.kit.bare_order import order_of_computation

TIMED_CLASSES = (Fwd, BwdInput, BwdWeight, Bwd)
"""Classes with a duration, in the order of a table of durations; messages and recomputation are part of these."""


@dataclass(frozen=True, eq=False)
class Levels:
    """Events of an order of computation, sorted by level.

    Attributes:
        first: offset of each level, and the end of the last one.
        durations_of: for each event, its row in the table of durations, kinds x stages.
        sources: predecessors of events, grouped by event.
        segments: for each event after level 0, the offset of its sources.
        last_backwards: for each stage, the events of its last backward and of its twins', which it is reduced with.
        reduced_in_turn: for each rank, its stages in the order in which their gradients are reduced (twins by number).
        stage_to_pp: the placement of the stages.
    """

    first: Ints
    durations_of: Ints
    sources: Ints
    segments: Ints
    last_backwards: tuple[Ints, ...]
    reduced_in_turn: tuple[tuple[int, ...], ...]
    stage_to_pp: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_to_pp)

    def ends(self, table: Times) -> Times:
        """Return the end time of each event, (events, n), for durations of (kinds, stages, n)."""
        durations = table.reshape(len(TIMED_CLASSES) * self.num_stages, -1)
        ends = np.vstack([durations, np.zeros_like(durations[:1])])[self.durations_of]
        first, segments = self.first.tolist(), self.segments
        starts_of = np.r_[segments, len(self.sources)]
        base = first[1]
        for low, high in pairwise(first[1:]):
            begin, end = starts_of[low - base], starts_of[high - base]
            waited = ends[self.sources[begin:end]]
            ends[low:high] += np.maximum.reduceat(waited, segments[low - base : high - base] - begin, axis=0)
        return ends

    def reduced(self, ends: Times, reduction: Times, tied: tuple[int, ...] = ()) -> Times:
        """Return the end time of all gradient reductions, (n,); `ends` as above, `reduction` (stages, n).

        Reductions of `tied` stages, which share weights, come after all backwards on these stages' ranks.
        """
        together = [rank for rank, stages in enumerate(self.reduced_in_turn) if set(stages) & set(tied)]
        ready = [ends[last].max(axis=0) for last in self.last_backwards]
        computed = [np.max([ready[stage] for stage in stages], axis=0) for stages in self.reduced_in_turn]
        synced = np.max([computed[rank] for rank in together], axis=0) if together else np.zeros(ends.shape[1])
        found = np.zeros(ends.shape[1])
        for stages in self.reduced_in_turn:
            done = np.zeros(ends.shape[1])
            for stage in sorted(stages, key=lambda one: one in tied):
                done = np.maximum(done, synced if stage in tied else ready[stage]) + reduction[stage]
            found = np.maximum(found, done)
        return found


@lru_cache(maxsize=64)
def levels_of(schedule: str, pp: int, microbatches: int, chunks: int | None) -> Levels:
    """Return the levels of a schedule's order. Raises `UsageError`."""
    plan = compute_order(schedule, pp, microbatches, chunks)
    events = Events.merge(plan)
    graph = build_graph(events, plan.flows, PROFILES["channel"])
    order = meeting_order(plan)
    assert order is not None
    level = graph.starts(np.ones(events.num_events), order).astype(np.int64)
    by_level = np.argsort(level, kind="stable")
    place = np.empty_like(by_level)
    place[by_level] = np.arange(len(by_level))
    sources, targets = place[graph.sources], place[graph.targets]
    by_target = np.argsort(targets, kind="stable")
    last, layout = _last_backwards(plan), plan.layout
    together = [list(layout.twins(stage) or (stage,)) for stage in range(len(plan.stage_to_pp))]
    turns = [stages[0] if len(stages) > 1 else last[stages[0]] for stages in together]
    first = np.searchsorted(level[by_level], np.arange(level.max() + 2))
    return Levels(
        first=first,
        durations_of=_rows_of_table(plan)[events.first_rows][by_level],
        sources=sources[by_target],
        segments=np.searchsorted(targets[by_target], np.arange(first[1], len(level))),
        last_backwards=tuple(place[events.of[last[stages]]] for stages in together),
        reduced_in_turn=tuple(tuple(sorted(layout.stages_of(rank), key=turns.__getitem__)) for rank in range(pp)),
        stage_to_pp=plan.stage_to_pp,
    )


def compute_order(schedule: str, pp: int, microbatches: int, chunks: int | None) -> PlanData:
    """Return a schedule's computations with their messages, and no later passes."""
    found = find_schedule(schedule)
    return place_messages(order_of_computation(found, found.shape(pp, microbatches, chunks), Mesh(pp=pp)))


def _rows_of_table(plan: PlanData) -> Ints:
    """Return, for each row of the plan, its row in a table of durations, kinds x stages; that after it for messages."""
    columns = plan.columns
    found = np.full(len(columns), len(TIMED_CLASSES) * len(plan.stage_to_pp), np.int64)
    for number, kind in enumerate(TIMED_CLASSES):
        rows = columns.rows_where(kind)
        found[rows] = number * len(plan.stage_to_pp) + columns.stage[rows]
    return found


def _last_backwards(plan: PlanData) -> Ints:
    """Return the row of the last backward that adds to each stage's gradients."""
    columns = plan.columns
    rows = columns.rows_where(Bwd, BwdWeight)
    last = np.zeros(len(plan.stage_to_pp), np.int64)
    np.maximum.at(last, columns.stage[rows], rows)
    return last
