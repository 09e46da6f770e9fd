"""Partners of an instruction: the send of a receive, the receives of a computation's inputs, groups of replicas.

rank 0   SendAct 3 ─┐                  partner(0, 3) = (1, 0)
rank 1   RecvAct 0 ─┴▶ Fwd 1           partner(1, 0) = (0, 3)      received_by(1, 1) = [0]
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from quintsched.graph.events_and_channels import Events
from quintsched.graph.transport_ordering_rules import find_profile
from quintsched.ir.instruction_columns import ABSENT, Ints
from quintsched.ir.instruction_set import AMONG_REPLICAS, WHOLE_MESH, Instruction, Recv
from quintsched.ir.mesh import REPLICA_AXES
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.message_slots import MessageRule, receive_lifetimes, send_lifetimes


class Partners:
    """Partners of a plan's instructions; ranks here are pipeline ranks, places are indices in their programs."""

    def __init__(self, plan: PlanData) -> None:
        self._plan, self._columns = plan, plan.columns
        events = Events.merge(plan)
        sent, received = events.channels.pairs
        self._events = events.of
        self._meetings: dict[tuple[int, int], int | None] = {}
        self._partner = np.full(len(self._columns), ABSENT)
        self._partner[sent], self._partner[received] = received, sent

    def row(self, pp_rank: int, index: int) -> int | None:
        """Return the row of an instruction; None if the index is out of range."""
        rows = self._columns.rows_of(pp_rank)
        return rows.start + index if 0 <= index < len(rows) else None

    def partner(self, pp_rank: int, index: int) -> tuple[int, int] | None:
        """Return (rank, place) of the other end of a message; None for other instructions."""
        row = self.row(pp_rank, index)
        if row is None or self._partner[row] == ABSENT:
            return None
        return self._columns.place(int(self._partner[row]))

    def meeting(self, pp_rank: int, index: int, other: int) -> int | None:
        """Return the place of a collective in another rank's program; None if that rank has no part in it."""
        row = self.row(pp_rank, index)
        if row is None:
            return None
        if pp_rank == other:
            return index
        event = int(self._events[row])
        if (event, other) not in self._meetings:
            rows = self._columns.rows_of(other)
            found = np.flatnonzero(self._events[rows.start : rows.stop] == event)
            self._meetings[event, other] = int(found[0]) if len(found) else None
        return self._meetings[event, other]

    def received_by(self, pp_rank: int, index: int) -> list[int]:
        """Return the places of the receives that provide an instruction's inputs; for a receive, its own place."""
        row = self.row(pp_rank, index)
        if row is None:
            return []
        if isinstance(self._columns.instruction(row), Recv):
            return [index]
        flows = self._plan.flows
        makers = flows.first_makers[[place for _, place in flows.consumes.of_rows(row, row + 1)]]
        makers = makers[makers != ABSENT]
        places: list[int] = (makers[self._columns.are(Recv)[makers]] - (row - index)).tolist()
        return places

    def received_from(self, pp_rank: int, index: int) -> list[int]:
        """Return the places of the receives whose messages are consumed by this or a later instruction."""
        rows = self._columns.rows_of(pp_rank)
        produces, takers = self._plan.flows.produces, self._plan.flows.first_takers
        found = [
            row - rows.start
            for row, place in produces.of_rows(rows.start, rows.stop)
            if self._partner[row] != ABSENT and takers[place] >= rows.start + index
        ]
        return [at for at in found if isinstance(self._columns.instruction(rows.start + at), Recv)]

    def issued_by(self, pp_rank: int, index: int) -> int:
        """Return the first place at which a message that may be issued ahead has certainly been issued."""
        row = self.row(pp_rank, index)
        first = index if row is None else int(self._ahead[row]) - (row - index)
        return min(first, index)

    @cached_property
    def _ahead(self) -> Ints:
        """Row before which each message is issued at the latest, if messages match by tag."""
        found = np.arange(len(self._columns))
        rule = MessageRule.from_profile(find_profile("tagged"), may_wait=True)
        for lifetimes in (receive_lifetimes(self._plan, rule), send_lifetimes(self._plan, rule)):
            found[lifetimes.rows] = lifetimes.first
        return found

    def group_axes(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the axes over which ranks synchronise in an instruction, besides its messages."""
        if isinstance(instruction, WHOLE_MESH):
            return tuple(name for name, _ in self._plan.mesh.axes)
        if isinstance(instruction, AMONG_REPLICAS):
            return REPLICA_AXES
        return ("tp", "cp", "ep") if instruction.computes else ()
