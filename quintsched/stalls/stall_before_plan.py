"""Diagnosis before the plan is known: ranks that come together do not wait for messages yet.

rank 1 (host a) was killed by SIGKILL setting up
rank 0 waits for it since 0.4 s
"""

from __future__ import annotations

from collections.abc import Sequence

from quintsched.stalls.culprit import first_dead
from quintsched.stalls.last_reported_rank_states import RankState
from quintsched.stalls.verdict_text import LEFT, MOST_LISTED, doing, ending, in_seconds, on_host, unknown


def find_without_plan(states: Sequence[RankState]) -> tuple[tuple[int, ...], str]:
    """Return the culprits (() if unknown) and the message, which is never empty."""
    dead = first_dead({state.rank: state for state in states})
    others = [state for state in states if state.rank not in dead]
    waiting = [state for state in others if state.awaits is not None and state.awaits.kind != "nothing"]
    culprits = [state for state in states if state.rank in dead]
    if not culprits and waiting:
        culprits = [state for state in others if state.awaits is not None and state.awaits.kind == "nothing"]
    if not culprits:
        return (), unknown(states)
    lines = [_accusation(state) for state in culprits[:MOST_LISTED]]
    name = "it" if len(culprits) == 1 else "them"
    waits = [f"rank {state.rank} waits for {name} since {in_seconds(state.since_s)}" for state in waiting[:MOST_LISTED]]
    return tuple(state.rank for state in culprits), "\n".join([*lines, ", ".join(waits)] if waits else lines)


def _accusation(state: RankState) -> str:
    name = f"rank {state.rank} ({on_host(state.host)})"
    if state.fate is not None:
        return f"{name} {ending(state.fate)} {doing(state.phase)}"
    if state.phase == "ended":
        return f"{name} is {doing(state.phase)}: {LEFT}"
    return f"{name} has not gone on for {in_seconds(state.since_s)} {doing(state.phase)}"
