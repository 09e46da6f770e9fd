"""Verdict: the first rank that died; else ranks at the ends of all waits, that wait for none; else ranks that skipped.

    rank 0 ──▶ rank 1 ──▶ rank 2     waits for none, has been at Fwd(2, 3) for 12 s: rank 2
    rank 0 ──▶ rank 1 ──▶ rank 0     a cycle, but rank 1 is past its send: rank 1
    rank 0 ──▶ rank 1 ──▶ rank 0     a cycle, and all have done what they could: unknown

A rank that raised because a peer was lost, or that gave up with exit code 4, is a victim: it counts as still waiting
where it was. A reported state is trusted only if the rank has been there for a while, longer than the age of any other
report: so no rank is blamed for having moved on since. No rank is named on a guess.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quintsched.errors import StallError, listed_ranks
from quintsched.ir.plan_data import PlanData
from quintsched.stalls.different_batches import find_other_data
from quintsched.stalls.last_reported_rank_states import MOST_TEXT, RankState
from quintsched.stalls.stall_report import StallReport
from quintsched.stalls.verdict_data import Culprit, Fault, WaitLink, describe_place, where_it_stands
from quintsched.stalls.verdict_text import ending
from quintsched.stalls.wait_graph import Edge, WaitGraph

STILL_S = 1.0
"""Seconds that a rank has to be at a place to count as standing still."""

TOGETHER_S = 1.0
"""Seconds within which ranks of one host count as having ended together."""

SILENT_S = 3.0
"""Seconds of silence after which a rank of another host may be unreachable: ranks report every second."""

LOST_PEER = re.compile(r"\AStallError\b")
"""Beginning of errors that are the consequence of another rank's error; ranks classify their own and mark them so."""

MISFIT = re.compile(r"\A(MisfitError\b|(rank \d+ (\([^)]*\) )?)?received (from rank \d+ )?what it did not expect)")
"""Beginning of errors for a message that does not fit."""

LEFT_OVER = re.compile(
    r"expected: (?P<message>.+), of step (?P<step>\d+); what came is: (?P=message), of step (?P<came>\d+)"
)
"""Report of a receiver of a message that it should have received in an earlier step, and skipped there."""

_LATER = {"stopped": 0, "signal": 0, "gone": 0, "error": 1, "exit": 2, "unreachable": 3, "silent": 3}
"""Order of fates noticed at about the same time: those of a higher number may be the consequence of the others."""

SIGTERM = 15


def find_culprit(plan: PlanData, states: Sequence[RankState], *, still_s: float = STILL_S) -> StallReport:
    """Return the culprits of a run that stands still, or whose processes ended, with the chain of waits.

    `plan` is the plan that the ranks run. A rank counts as standing still after `still_s` seconds at its place; pass
    half of the limit that was exceeded. Without a culprit, none can be told from the others.
    """
    known = {state.rank: state for state in states if 0 <= state.rank < plan.mesh.size}
    dead = first_dead(known)
    victims = {rank: replace(state, fate=None) for rank, state in known.items() if rank not in dead}
    graph = WaitGraph(plan, known | victims)
    edges = {rank: graph.edges(rank) for rank in known if rank not in dead}
    dead |= {rank for rank, state in known.items() if any(_raised_alike(state, known[one]) for one in dead)}
    accused = [accusation for rank in sorted(dead) for accusation in _ended(graph, known[rank])]
    if not dead and not any(_is_unreachable(state) for state in known.values()):
        accused = _standing(graph, known | victims, edges, still_s)
    accused = _given_other_data(plan, known, accused) or list(dict.fromkeys(accused))
    culprits = [_culprit(plan, known[one.rank], one) for one in accused]
    chain = _chain(plan, [one.rank for one in accused], edges, known)
    return StallReport(culprits=tuple(culprits), chain=tuple(chain), states=tuple(known.values()), plan=plan)


@dataclass(frozen=True)
class Accusation:
    """Accused rank and its fault; for a message, its index and step, and the receiver's report."""

    rank: int
    fault: Fault
    index: int | None = None
    step: int | None = None
    said: str = ""


def first_dead(states: Mapping[int, RankState]) -> set[int]:
    """Return the ranks whose process failed first, without those that may have ended because of them."""
    suspects = [state for state in states.values() if state.fate is not None and not _is_victim(state)]
    if any(state.fate is not None and state.fate.kind != "unreachable" for state in suspects):
        suspects = [state for state in suspects if state.fate is not None and state.fate.kind != "unreachable"]
    if not suspects or (_is_unreachable(suspects[0]) and _is_cut_off(states)):
        return set()
    began = max(map(_ago_s, suspects))
    near = [state for state in suspects if began - _ago_s(state) <= TOGETHER_S]
    first = min(near, key=lambda state: (_rank_of_fate(state), -_ago_s(state)))
    return {state.rank for state in near if state is first or _went_together(state, first)}


def _raised_alike(state: RankState, other: RankState) -> bool:
    """Return whether two ranks raised errors with the same text, as ranks do that refuse something together."""
    if state.fate is None or other.fate is None or not state.fate.text:
        return False
    return state.fate.kind == other.fate.kind == "error" and state.fate.text == other.fate.text


def _given_other_data(
    plan: PlanData, states: Mapping[int, RankState], accused: Sequence[Accusation]
) -> list[Accusation]:
    """Accuse the ranks with other data, if the fates of the accused may be the consequence of that."""
    ranks = sorted({one.rank for one in accused})
    if not all(_may_follow_from_data(one, states[one.rank], alone=len(ranks) == 1) for one in accused):
        return []
    found = find_other_data(plan.mesh, states, ranks)
    if found is None:
        return []
    fates = [(rank, fate) for rank in ranks if (fate := states[rank].fate) is not None]
    then = "".join(f"; then rank {rank} {ending(fate).rstrip(',')}" for rank, fate in fates)
    return [Accusation(rank, "other data", said=found.said + then) for rank in found.ranks]


def _may_follow_from_data(accused: Accusation, state: RankState, *, alone: bool) -> bool:
    """Return whether a rank's fault can result from different shapes on the ranks of its replica."""
    if state.fate is None or accused.fault != "ended":
        return True
    if state.fate.kind == "error":
        return alone and state.phase in ("step", "evaluate")
    return state.fate.kind in ("signal", "exit") and state.fate.code in _ABORTS


def _is_unreachable(state: RankState) -> bool:
    return state.fate is not None and state.fate.kind == "unreachable"


def _is_cut_off(states: Mapping[int, RankState]) -> bool:
    """Return whether all hosts but rank 0's, where the observer runs, are silent: its own link may be cut."""
    here = states[min(states)].host
    return all(_is_unreachable(one) or one.heard_s > SILENT_S for one in states.values() if one.host != here) and any(
        one.host != here for one in states.values()
    )


def _is_victim(state: RankState) -> bool:
    """Return whether a process ended as the consequence of another's end, or without any fault."""
    fate = state.fate
    if fate is None:
        return False
    if fate.kind == "gone" and state.phase == "ended":
        return True
    if fate.kind == "exit":
        gave_up = fate.code == StallError.exit_code and not fate.text
        return gave_up or (fate.code == 0 and state.phase == "ended")
    return fate.kind == "error" and bool(LOST_PEER.search(fate.text))


def _ago_s(state: RankState) -> float:
    """Return the seconds since a process failed."""
    return state.fate.ago_s if state.fate is not None else 0.0


def _rank_of_fate(state: RankState) -> int:
    fate = state.fate
    if fate is None or (fate.kind == "signal" and fate.code == SIGTERM):
        return max(_LATER.values())  # launchers end the other ranks so once one has failed
    return _LATER[fate.kind]


def _went_together(state: RankState, first: RankState) -> bool:
    """Return whether two processes ended by one cause: on one host, or on hosts that became unreachable."""
    if state.fate is None or first.fate is None or _rank_of_fate(state) != _rank_of_fate(first):
        return False
    if state.fate.kind == "error" or state.fate.kind == "exit":
        return False
    return state.host == first.host or state.fate.kind == first.fate.kind == "unreachable"


def _ended(graph: WaitGraph, state: RankState) -> list[Accusation]:
    """Return the culprits of a failed process: itself, or the sender of a message that it could not receive."""
    fate, awaits = state.fate, state.awaits
    assert fate is not None
    is_misfit = fate.kind == "error" and MISFIT.search(fate.text)
    if is_misfit and awaits is not None and awaits.kind == "receive":
        late = LEFT_OVER.search(fate.text)
        if late is not None and int(late["came"]) < int(late["step"]):
            return [Accusation(state.rank, "skipped", awaits.index, int(late["came"]))]
        said = f"rank {state.rank}: {fate.text}"
        return [
            Accusation(edge.on, "wrong message", edge.on_index, state.step, said) for edge in graph.edges(state.rank)
        ]
    if fate.code in _ABORTS and fate.kind in ("signal", "exit"):
        return _aborted(state, graph)
    return [Accusation(state.rank, "ended")]


_ABORTS = (6, 134)
"""SIGABRT, as a signal and as an exit code: gloo aborts a process that gets more bytes than its buffer has."""


def _aborted(state: RankState, graph: WaitGraph) -> list[Accusation]:
    """Return the culprits of an aborted process: itself, unless the message that it waited for was too long.

    Gloo aborts a process that gets more bytes than its buffer has, by a message or by another collective than its own.
    If the sender does not report its bytes, the cause is in doubt, and the message says so.
    """
    is_receiving = state.awaits is not None and state.awaits.kind == "receive"
    for edge in graph.edges(state.rank) if is_receiving else ():
        sender = graph.state(edge.on)
        if sender.sent_at == edge.on_index and _sent_too_much(sender, state):
            said = f"rank {state.rank}: it was aborted as {sender.sent} bytes came, where it had room for {state.room}"
            return [Accusation(sender.rank, "wrong message", edge.on_index, state.step, said)]
    return [Accusation(state.rank, "ended", said=_doubt(graph, state))]


def _sent_too_much(sender: RankState, receiver: RankState) -> bool:
    return sender.sent > receiver.room > 0


def _doubt(graph: WaitGraph, state: RankState) -> str:
    """Return how gloo may have aborted a process, as text; "" if no message was on the way to it."""
    senders = sorted({edge.on for edge in graph.arriving(state.rank)})
    too_much = [rank for rank in senders if _sent_too_much(graph.state(rank), state)]
    is_receiving = state.awaits is not None and state.awaits.kind == "receive"
    partners = [] if is_receiving else graph.partners(state.rank)
    how = "it did so itself, or gloo did as more came than there was room for"
    if partners and not too_much:
        return f"{how}: {listed_ranks(partners)} may have begun another collective than it"
    return f"{how}: messages of {listed_ranks(too_much or senders)} were on the way" if senders else ""


def _standing(
    graph: WaitGraph, states: Mapping[int, RankState], edges: Mapping[int, Sequence[Edge]], still_s: float
) -> list[Accusation]:
    """Return the accusations where all ranks are alive and some hold up the others."""
    still = {rank for rank, state in states.items() if _stands_still(state, still_s)}
    waits = [edge for rank in still for edge in edges[rank] if edge.on in still]
    for skipped in ([edge for edge in waits if edge.skipped], [edge for edge in waits if edge.early]):
        roots = sorted({edge.on for edge in waits if graph.stands_alone(edge.on)})
        if roots and not (skipped and skipped[0].skipped):
            return [Accusation(rank, "stands") for rank in roots]
        at_fault = [
            Accusation(edge.on, "skipped", edge.on_index, _step_of_message(states[edge.waiter])) for edge in skipped
        ]
        if at_fault and (skipped[0].skipped or len(set(at_fault)) == 1):
            return at_fault
    alone = len(states) == 1 and still and graph.stands_alone(*still)
    return [Accusation(rank, "stands") for rank in still] if alone else []


def _step_of_message(waiter: RankState) -> int | None:
    """Return the step of the message that a rank waits for: between programs, that is the previous step."""
    begins = waiter.index is None and waiter.phase == "step" and waiter.step is not None
    return waiter.step - 1 if begins and waiter.step is not None else waiter.step


def _stands_still(state: RankState, still_s: float) -> bool:
    """Return whether a rank certainly still is where it reported to be; one that has ended is."""
    return state.phase == "ended" or (state.since_s >= still_s and state.heard_s <= still_s)


def _chain(
    plan: PlanData, accused: Sequence[int], edges: Mapping[int, Sequence[Edge]], states: Mapping[int, RankState]
) -> Iterable[WaitLink]:
    """Yield the ranks that wait for the accused, nearest first, each with the place that it waits for."""
    waiters: dict[int, list[Edge]] = {}
    for of_rank in edges.values():
        for edge in of_rank:
            waiters.setdefault(edge.on, []).append(edge)
    seen = set(accused)
    queue = deque(sorted(seen))
    while queue:
        for edge in sorted(waiters.get(queue.popleft(), ()), key=lambda edge: edge.waiter):
            if edge.waiter not in seen:
                seen.add(edge.waiter)
                queue.append(edge.waiter)
                yield _link(plan, edge, states)


def _link(plan: PlanData, edge: Edge, states: Mapping[int, RankState]) -> WaitLink:
    waiter, on = states[edge.waiter], states[edge.on]
    is_message = waiter.awaits is None or waiter.awaits.kind != "collective"
    return WaitLink(
        waiter=describe_place(plan, waiter, edge.index) if is_message else where_it_stands(plan, waiter),
        waits_for=describe_place(plan, on, edge.on_index) if is_message else where_it_stands(plan, on),
        since_s=waiter.since_s,
    )


def _culprit(plan: PlanData, state: RankState, accusation: Accusation) -> Culprit:
    """Return all known facts about an accused rank."""
    is_message = accusation.index is not None
    return Culprit(
        rank=state.rank,
        host=state.host,
        pid=state.pid,
        where=tuple(plan.mesh.coordinates(state.rank).items()),
        fault=accusation.fault,
        fate=state.fate,
        phase=state.phase,
        step=accusation.step if is_message else state.step,
        place=describe_place(plan, state, accusation.index) if is_message else where_it_stands(plan, state),
        stands_at=state.index if state.program == plan.mode else None,
        since_s=state.since_s,
        said=accusation.said[:MOST_TEXT],
    )
