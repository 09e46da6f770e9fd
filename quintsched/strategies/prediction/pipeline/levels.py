"""Time many cost models of one order of computation at once: the event graph of a plan, level by level.

    level   0    1     2     3     4            an event's level is the longest way to it, in events; those of one
    rank 0  F0   F1 ─▶ F2 ─▶ …                  level wait only for earlier ones, so that one operation of numpy
             ╲    ╲                             times them all, under as many cost models as there are columns
    rank 1        m0 ─▶ F0 ─▶ B0 …

The waits are those of the simulator (a queue for each rank's computations and for each directed channel), and so are
the results; the order is compiled without proof, reductions and optimizer. Orders and their levels are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from quintsched.graph.edges import build_graph
from quintsched.graph.event_graph import Times
from quintsched.graph.plan_events import Events
from quintsched.graph.profiles import PROFILES
from quintsched.graph.rendezvous import meeting_order
from quintsched.ir.columns import Ints
from quintsched.ir.instructions import Bwd, BwdInput, BwdWeight, Fwd, Message, Recompute, RecvGrad, SendAct
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import PlanData
from quintsched.passes.place_messages import place_messages
from quintsched.passes.place_recomputes import place_recomputes
from quintsched.schedules import find_schedule
from quintsched.schedules.kit.order import order_of_computation

KINDS = (Fwd, BwdInput, BwdWeight, Bwd, Recompute, Message)
"""What takes time, in the order of a table of durations; a message counts with the stage whose input it holds, or the
gradient of that."""


@dataclass(frozen=True, eq=False)
class Levels:
    """The events of an order of computation, sorted by level.

    Attributes:
        first: where each level begins, and where the last one ends.
        durations_of: for each event, its row in the table of durations, kinds x stages.
        sources: what events wait for, by the event that waits.
        segments: for each event after level 0, where its sources begin.
        last_backwards: for each stage, the event that ends its last backward.
        reduced_in_turn: for each rank, its stages in the order in which their gradients are complete.
        stage_to_pp: where the stages lie.
    """

    first: Ints
    durations_of: Ints
    sources: Ints
    segments: Ints
    last_backwards: Ints
    reduced_in_turn: tuple[tuple[int, ...], ...]
    stage_to_pp: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Of the order's stages."""
        return len(self.stage_to_pp)

    def ends(self, table: Times) -> Times:
        """Return when each event ends, (events, n), for durations of (kinds, stages, n) each."""
        durations = table.reshape(len(KINDS) * self.num_stages, -1)
        ends = durations[self.durations_of]
        first, segments = self.first.tolist(), self.segments
        starts_of = np.r_[segments, len(self.sources)]
        base = first[1]
        for low, high in pairwise(first[1:]):
            begin, end = starts_of[low - base], starts_of[high - base]
            waited = ends[self.sources[begin:end]]
            ends[low:high] += np.maximum.reduceat(waited, segments[low - base : high - base] - begin, axis=0)
        return ends

    def reduced(self, ends: Times, reduction: Times, tied: tuple[int, ...] = ()) -> Times:
        """Return when replicas have added up all gradients, (n,); `ends` as above, `reduction` (stages, n).

        Those of `tied` stages, which share weights, come after all backwards of these stages' ranks.
        """
        together = [rank for rank, stages in enumerate(self.reduced_in_turn) if set(stages) & set(tied)]
        computed = [ends[self.last_backwards[list(stages)]].max(axis=0) for stages in self.reduced_in_turn]
        synced = np.max([computed[rank] for rank in together], axis=0) if together else np.zeros(ends.shape[1])
        found = np.zeros(ends.shape[1])
        for stages in self.reduced_in_turn:
            done = np.zeros(ends.shape[1])
            for stage in sorted(stages, key=lambda one: one in tied):
                done = (
                    np.maximum(done, synced if stage in tied else ends[self.last_backwards[stage]]) + reduction[stage]
                )
            found = np.maximum(found, done)
        return found


@lru_cache(maxsize=64)
def levels_of(
    schedule: str, pp: int, microbatches: int, chunks: int | None, recompute: tuple[bool, ...] = ()
) -> Levels:
    """Return the levels of a schedule's order; `recompute` says which stages are recomputed. Raises `UsageError`."""
    plan = compute_order(schedule, pp, microbatches, chunks, recompute)
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
    last = _last_backwards(plan)
    first = np.searchsorted(level[by_level], np.arange(level.max() + 2))
    return Levels(
        first=first,
        durations_of=_rows_of_table(plan)[events.first_rows][by_level],
        sources=sources[by_target],
        segments=np.searchsorted(targets[by_target], np.arange(first[1], len(level))),
        last_backwards=place[events.of[last]],
        reduced_in_turn=tuple(tuple(sorted(plan.layout.stages_of(rank), key=last.__getitem__)) for rank in range(pp)),
        stage_to_pp=plan.stage_to_pp,
    )


def compute_order(
    schedule: str, pp: int, microbatches: int, chunks: int | None, recompute: tuple[bool, ...] = ()
) -> PlanData:
    """Return a schedule's computations with their messages, and nothing after them."""
    found = find_schedule(schedule)
    shape = found.shape(pp, microbatches, chunks)
    order = order_of_computation(found, shape, Mesh(pp=pp))
    if any(recompute):
        order = replace(order, recompute=tuple(map(int, recompute)))
    return place_messages(place_recomputes(order))


def _rows_of_table(plan: PlanData) -> Ints:
    """Return for each row of the plan its row in a table of durations, kinds x stages."""
    columns = plan.columns
    found = np.zeros(len(columns), np.int64)
    for number, kind in enumerate(KINDS):
        rows = columns.rows_where(kind)
        found[rows] = number * len(plan.stage_to_pp) + columns.stage[rows]
    outputs = columns.rows_where(SendAct, RecvGrad)
    found[outputs] += plan.layout.all_after(columns.stage[outputs], columns.unit[outputs]) - columns.stage[outputs]
    return found


def _last_backwards(plan: PlanData) -> Ints:
    """Return the last row that adds to each stage's gradients."""
    columns = plan.columns
    rows = columns.rows_where(Bwd, BwdWeight)
    last = np.zeros(len(plan.stage_to_pp), np.int64)
    np.maximum.at(last, columns.stage[rows], rows)
    return last
