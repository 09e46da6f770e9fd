"""Times of many cuts under one order of computation, at once: the order is a graph, walked level by level.

    level   0    1    2    3         a computation ends at the later end of what it waits for (the one before it on
    rank 0  F0   F1        B0        its rank, and its input), and its own duration: a column for each cut
    rank 1       F0   B0

A message is a node of its own where it takes time: it waits for the message before it on its wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quintsched.errors import UnsoundError
from quintsched.ir.instruction_columns import Amounts, Ints
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd, Recompute
from quintsched.solve.order_problem import Objective
from quintsched.solve.stage_cuts.layer_costs import Layers

KINDS: tuple[type[Compute], ...] = (Fwd, BwdInput, BwdWeight, Bwd)
"""Kinds of computations; of an order that recomputes, that is the last one."""
PARTS: dict[type[Compute], tuple[str, ...]] = {
    Fwd: ("forward",),
    BwdInput: ("backward_input",),
    BwdWeight: ("backward_weight",),
    Bwd: ("backward_input", "backward_weight"),
    Recompute: ("recompute",),
}
"""Amounts of layers that add up to a computation's time."""
MOST_NUMBERS = 1 << 22
"""Most ends that are held at once: cuts times nodes."""


@dataclass(frozen=True, eq=False)
class OrderGraph:
    """Graph of an order; nodes are sorted by level, and node 0 is the start of the step.

    `before` and `input` are the nodes that each waits for, `column` its duration: kind * stages + stage, and the last
    one for messages. `levels` has the first node of each level.
    """

    stage_to_pp: tuple[int, ...]
    before: Ints
    input: Ints
    column: Ints
    levels: Ints
    first: Ints
    """First node of each rank."""
    last: Ints
    held: tuple[Amounts, ...]
    """For each rank, numbers of microbatches that its stages hold at the same time: rows that no other one exceeds."""
    kinds: tuple[type[Compute], ...] = KINDS
    routes: int = 1
    """Number of routes, each with as many stages, in order."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.column)

    def ends(self, layers: Layers, cuts: Ints, p2p: float) -> Amounts:
        """Return the end of each node: (nodes, cuts)."""
        durations = self.durations(layers, cuts, p2p)
        ends = np.zeros((self.num_nodes, len(cuts)))
        for first, until in pairwise(self.levels.tolist()):
            part = slice(first, until)
            ends[part] = np.maximum(ends[self.before[part]], ends[self.input[part]]) + durations[self.column[part]]
        return ends

    def durations(self, layers: Layers, cuts: Ints, p2p: float) -> Amounts:
        """Return the duration of each column: (columns, cuts)."""
        each = [sum(layers.of_stages(name, cuts).T for name in PARTS[kind]) for kind in self.kinds]
        return np.concatenate([*each, np.full((1, len(cuts)), p2p)])

    def values(self, layers: Layers, cuts: Ints, p2p: float, objective: Objective) -> Amounts:
        """Return the time of each cut."""
        most = max(1, MOST_NUMBERS // self.num_nodes)
        parts = [self._values(layers, cuts[at : at + most], p2p, objective) for at in range(0, len(cuts), most)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _values(self, layers: Layers, cuts: Ints, p2p: float, objective: Objective) -> Amounts:
        ends = self.ends(layers, cuts, p2p)
        spans = ends[self.last]
        if objective == "span":
            starts = np.maximum(ends[self.before[self.first]], ends[self.input[self.first]])
            spans = spans - starts
        found: Amounts = spans.max(axis=0)
        return found

    def critical(self, layers: Layers, cut: Ints, p2p: float, objective: Objective) -> Ints:
        """Return how often each column is on the critical path of one cut."""
        ends = self.ends(layers, cut[None], p2p)[:, 0]
        starts = np.maximum(ends[self.before], ends[self.input])
        spans = ends[self.last] - (starts[self.first] if objective == "span" else 0.0)
        rank = int(spans.argmax())
        counts = np.zeros(len(self.kinds) * len(self.stage_to_pp) + 1, np.int64)
        paths = [(int(self.last[rank]), 1)]
        if objective == "span":  # a path from the start of the step: without what precedes the rank's first forward
            paths.append((int(self.input[self.first[rank]]), -1))
        for node, count in paths:
            while node:
                counts[self.column[node]] += count
                before, source = int(self.before[node]), int(self.input[node])
                node = before if ends[before] >= ends[source] else source
        return counts

    def peaks(self, layers: Layers, cuts: Ints) -> Amounts:
        """Return the most memory of each rank, with its state: (cuts, ranks)."""
        each, state = layers.of_stages("activation", cuts), layers.of_stages("state", cuts)
        ranks = np.array(self.stage_to_pp)
        found = [
            (each[:, ranks == rank] @ rows.T).max(axis=1, initial=0.0) + state[:, ranks == rank].sum(axis=1)
            for rank, rows in enumerate(self.held)
        ]
        return np.stack(found, axis=1)


def graph_of(
    orders: Iterable[Iterable[Compute]], stage_to_pp: Sequence[int], *, sends: bool, routes: int = 1
) -> OrderGraph:
    """Return the graph of an order; `sends`: whether messages take time. Raises `UnsoundError` if it cannot run."""
    return _Builder(tuple(stage_to_pp), [list(order) for order in orders], sends, routes).graph()


class _Builder:
    """Walk over an order that gives each computation and message a level: all that it waits for is on lower ones."""

    def __init__(self, stage_to_pp: tuple[int, ...], orders: list[list[Compute]], sends: bool, routes: int) -> None:
        self.stage_to_pp, self.orders, self.sends, self.routes = stage_to_pp, orders, sends, routes
        recomputes = any(isinstance(one, Recompute) for order in orders for one in order)
        self.kinds = (*KINDS, Recompute) if recomputes else KINDS
        self.rows: list[tuple[int, int, int, int]] = [(0, 0, 0, -1)]
        """Of each node: level, the nodes that it waits for, column."""
        self.done: dict[tuple[bool, int, int], int] = {}
        """Node of each forward and each (input half of a) backward."""
        self.wires: dict[tuple[int, int], int] = {}

    def graph(self) -> OrderGraph:
        """Return the graph."""
        nodes = self._walk()
        table = np.array(self.rows)
        order = np.argsort(table[:, 0], kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        levels = np.flatnonzero(np.diff(table[order, 0], prepend=-1))
        return OrderGraph(
            self.stage_to_pp,
            place[table[order, 1]],
            place[table[order, 2]],
            table[order, 3],
            np.append(levels[1:], len(order)),
            place[[own[0] for own in nodes]],
            place[[own[-1] for own in nodes]],
            tuple(self._held(rank) for rank in range(len(self.orders))),
            self.kinds,
            self.routes,
        )

    def _walk(self) -> list[list[int]]:
        """Add all nodes; return those of each rank."""
        nodes: list[list[int]] = [[] for _ in self.orders]
        ready, waiting = list(range(len(self.orders))), dict[tuple[bool, int, int], int]()
        while ready:
            rank = ready.pop()
            own = nodes[rank]
            while len(own) < len(self.orders[rank]):
                one = self.orders[rank][len(own)]
                needed = self._needed(one)
                if needed is not None and needed not in self.done:
                    waiting[needed] = rank
                    break
                source = 0 if needed is None else self._arrival(needed, rank)
                own.append(self._add(own[-1] if own else 0, source, self.kinds.index(type(one)), one.stage))
                if not isinstance(one, BwdWeight | Recompute):
                    made = (isinstance(one, Fwd), one.stage, one.microbatch)
                    self.done[made] = own[-1]
                    other = waiting.pop(made, rank)
                    ready += [other] if other != rank else []
        if any(len(own) < len(order) for own, order in zip(nodes, self.orders, strict=True)):
            raise UnsoundError("the order cannot run: its computations wait for each other in a circle")
        return nodes

    def _needed(self, one: Compute) -> tuple[bool, int, int] | None:
        """Return the computation whose output another one waits for; None: none beside its rank's order."""
        way = len(self.stage_to_pp) // self.routes
        if isinstance(one, Fwd):
            return (True, one.stage - 1, one.microbatch) if one.stage % way else None
        if isinstance(one, BwdWeight | Recompute):
            return (isinstance(one, Recompute), one.stage, one.microbatch)
        is_last = one.stage % way == way - 1
        return (True, one.stage, one.microbatch) if is_last else (False, one.stage + 1, one.microbatch)

    def _arrival(self, needed: tuple[bool, int, int], rank: int) -> int:
        node, source = self.done[needed], self.stage_to_pp[needed[1]]
        if source == rank or not self.sends:
            return node
        wire = (source, rank)
        self.wires[wire] = self._add(self.wires.get(wire, 0), node, len(self.kinds), 0)
        return self.wires[wire]

    def _add(self, before: int, source: int, kind: int, stage: int) -> int:
        level = 1 + max(self.rows[before][0], self.rows[source][0])
        self.rows.append((level, before, source, kind * len(self.stage_to_pp) + stage))
        return len(self.rows) - 1

    def _held(self, rank: int) -> Amounts:
        stages = [stage for stage, where in enumerate(self.stage_to_pp) if where == rank]
        now = dict.fromkeys(stages, 0)
        seen: dict[tuple[int, ...], None] = {}
        for one in self.orders[rank]:
            if isinstance(one, Fwd):
                now[one.stage] += 1
                seen[tuple(now.values())] = None
            elif isinstance(one, Bwd | BwdWeight):
                now[one.stage] -= 1
        rows = np.array(list(seen), float)
        exceeded = [bool(((rows >= row).all(axis=1) & (rows > row).any(axis=1)).any()) for row in rows]
        return rows[~np.array(exceeded, np.bool_)]
