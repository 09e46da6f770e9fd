"""Wait graph between ranks: the waits of the plan at the ranks' current places.

    rank 0 awaits its receive 11 ──▶ rank 1 has not reached its send 14: rank 0 waits for rank 1
                                 ──▶ rank 1 is past its send 14: it skipped it
    rank 2 awaits ranks 0, 2     ──▶ rank 0 has not reached it: rank 2 waits for rank 0
    rank 3 awaits nothing        ──▶ it stands still by itself

Progress of ranks is compared by the number of programs begun, then by the place in the program. A rank that does not
report its wait counts as waiting for all partners of its instruction that are behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quintsched.ir.instruction_set import Recv
from quintsched.ir.plan_data import PlanData
from quintsched.stalls.last_reported_rank_states import RankState
from quintsched.stalls.partner_instructions import Partners

BEFORE, AT, PAST = -1, 0, 1


@dataclass(frozen=True)
class Edge:
    """Wait of rank `waiter`, at `index`, for rank `on` to reach `on_index`.

    Both are indices in programs; None if the wait is not for an instruction. `skipped`: `on` is past it, so that it
    never will do it; `early`: `on` is past it if messages are issued ahead of their places.
    """

    waiter: int
    index: int | None
    on: int
    on_index: int | None
    skipped: bool = False
    early: bool = False


class WaitGraph:
    """Waits of all ranks of a plan that reported a state, by global rank."""

    def __init__(self, plan: PlanData, states: Mapping[int, RankState]) -> None:
        self._plan, self._states, self._partners = plan, states, Partners(plan)
        self._missing: dict[tuple[object, ...], list[RankState]] = {}
        numbers: dict[tuple[int, ...], int] = {}
        self._groups = {
            rank: numbers.setdefault(state.awaits.ranks, len(numbers))
            if state.awaits is not None and state.awaits.kind == "collective"
            else None
            for rank, state in states.items()
        }

    def state(self, rank: int) -> RankState:
        """Return the state that a rank reported."""
        return self._states[rank]

    def edges(self, rank: int) -> list[Edge]:
        """Return the waits of a rank; [] if it waits for none, or they cannot be known."""
        state = self._states[rank]
        if state.awaits is None:
            return [edge for edge in self._possible(state) if not edge.skipped]
        if state.awaits.kind == "nothing":
            return []
        if state.awaits.kind == "collective":
            return self._collective(state, state.awaits.ranks)
        return [] if state.awaits.index is None else self._message(state, state.awaits.index, state.awaits.kind)

    def arriving(self, rank: int) -> list[Edge]:
        """Return the messages that may be on the way to a rank and not yet received, as waits for their senders."""
        state = self._states[rank]
        if state.index is None or state.program != self._plan.mode:
            return []
        receives = self._partners.received_from(self._plan.mesh.pp_rank(rank), state.index)
        found = [edge for index in receives for edge in self._message(state, index, "receive")]
        return [edge for edge in found if edge.skipped or edge.early or not self._is_before(edge)]

    def _is_before(self, edge: Edge) -> bool:
        """Return whether the sender has not yet reached the earliest place at which it may issue the message."""
        on = self._states[edge.on]
        assert edge.on_index is not None
        issued = self._partners.issued_by(self._plan.mesh.pp_rank(edge.on), edge.on_index)
        return self.standing(edge.on, self._states[edge.waiter], issued) == BEFORE and on.fate is None

    def partners(self, rank: int) -> list[int]:
        """Return the ranks that a rank synchronises with: those of its wait, or of its current instruction."""
        state, mesh = self._states[rank], self._plan.mesh
        if state.awaits is not None and state.awaits.kind == "collective":
            return [other for other in state.awaits.ranks if other != rank]
        if state.index is None or state.program != self._plan.mode:
            return []
        row = self._partners.row(mesh.pp_rank(rank), state.index)
        if row is None:
            return []
        axes = self._partners.group_axes(self._plan.columns.instruction(row))
        group = next(group for group in mesh.groups(*axes) if rank in group)
        return [other for other in group if other != rank]

    def stands_alone(self, rank: int) -> bool:
        """Return whether a rank reports that it waits for none; one without a report may be waiting for any."""
        awaits = self._states[rank].awaits
        return awaits is not None and awaits.kind == "nothing"

    def standing(self, rank: int, beside: RankState, index: int) -> int | None:
        """Return whether a rank is before, at or past a place of the program that `beside` runs, or ran last.

        None if it cannot be known.
        """
        state = self._states[rank]
        if state.run is not None and beside.run is not None:
            if state.run != beside.run or state.index is None:
                return BEFORE if state.run < beside.run else PAST
            return _compare(state.index, index)
        if beside.step is None or beside.index is None or beside.phase != "step":
            return None
        if state.step != beside.step:
            return BEFORE if state.step is None or state.step < beside.step else PAST
        if state.phase != "step":
            return PAST
        return None if state.index is None else _compare(state.index, index)

    def _message(self, state: RankState, index: int, kind: str) -> list[Edge]:
        """Return the wait for the other end of a message, which this rank is to "receive" or "send"."""
        mesh = self._plan.mesh
        where = mesh.coordinates(state.rank)
        found = self._partners.partner(where.get("pp", 0), index) if state.program == self._plan.mode else None
        if found is None or isinstance(self._plan.programs[found[0]][found[1]], Recv) != (kind == "send"):
            return []
        pp_rank, on_index = found
        on = mesh.rank(where | {"pp": pp_rank})
        if on not in self._states:
            return []
        standing = self.standing(on, state, on_index)
        early = False
        awaits = self._states[on].awaits
        if standing in (BEFORE, AT) and awaits is not None and awaits.kind != "nothing":
            # A rank that waits at a place has issued all messages due before it.
            early = self.standing(on, state, self._partners.issued_by(pp_rank, on_index)) in (AT, PAST)
        return [Edge(state.rank, index, on, on_index, skipped=standing == PAST, early=early)]

    def _collective(self, state: RankState, ranks: tuple[int, ...]) -> list[Edge]:
        """Return the waits for the members of a group that have not reached the collective."""
        pp_rank = self._plan.mesh.pp_rank(state.rank)
        key = self._groups[state.rank], pp_rank, *_place(state)
        if key not in self._missing:
            others = (self._states[rank] for rank in ranks if rank in self._states)
            self._missing[key] = [other for other in others if not self._has_come(other, state, pp_rank)]
        missing = self._missing[key]
        return [Edge(state.rank, state.index, one.rank, one.index) for one in missing if one.rank != state.rank]

    def _has_come(self, state: RankState, beside: RankState, pp_rank: int) -> bool:
        """Return whether a rank has reached the collective that `beside`, on pipeline rank `pp_rank`, waits for."""
        standing = self._standing_at_place(state, beside, pp_rank)
        return standing == PAST or (standing != BEFORE and self._groups[state.rank] == self._groups[beside.rank])

    def _standing_at_place(self, state: RankState, beside: RankState, pp_rank: int) -> int | None:
        """Return whether a rank is before, at or past the place of `beside`; None if it cannot be known."""
        own, other = _progress(state, beside)
        if own is None or other is None:
            return None
        if own[0] != other[0]:
            return BEFORE if own[0] < other[0] else PAST
        if state.index is None or beside.index is None:
            return None if own == other else _compare(own[1], other[1])
        place = self._partners.meeting(pp_rank, beside.index, self._plan.mesh.pp_rank(state.rank))
        return None if place is None else _compare(state.index, place)

    def _possible(self, state: RankState) -> Iterator[Edge]:
        """Yield the possible waits of a rank that does not report its wait; `skipped` if the partner is past them."""
        if state.index is None or state.program != self._plan.mode:
            return
        pp_rank = self._plan.mesh.pp_rank(state.rank)
        for index in self._partners.received_by(pp_rank, state.index):
            yield from self._message(state, index, "receive")
        for rank in self.partners(state.rank):
            other = self._states.get(rank)
            if other is not None and self._standing_at_place(other, state, pp_rank) == BEFORE:
                yield Edge(state.rank, state.index, rank, other.index)


def _compare(index: float, other: float) -> int:
    return (index > other) - (index < other)


def _progress(*states: RankState) -> list[tuple[float, float] | None]:
    """Return the progress of ranks as tuples that compare; None where it cannot be known."""
    if all(state.run is not None for state in states):
        return [(state.run or 0, math.inf if state.index is None else state.index) for state in states]
    return [_progress_in_steps(state) for state in states]


def _progress_in_steps(state: RankState) -> tuple[float, float] | None:
    if state.phase == "evaluate" or (state.phase == "step" and state.index is None):
        return None
    return state.step or 0, math.inf if state.index is None else state.index


def _place(state: RankState) -> tuple[object, ...]:
    return state.phase, state.run, state.step, state.program, state.index
