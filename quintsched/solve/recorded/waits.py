"""Idle time of each rank, by what it has waited for: another rank that computes, or a message on its way.

    rank 0  F0 ········· B0     while rank 0 waits for B0, it waits for rank 1 to compute F0 and B0,
    rank 1     F0 B0 ~~▶        then for the message from rank 1

An input is followed back: while the rank that makes it waits itself, that one's input counts, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from quintsched.solve.recorded.replay import Recording

END, PAUSE = "end", "pause"

Waits = tuple[dict[str, float], ...]
"""For each rank, its idle times, the longest first: for "rank 3" that computes, for a "message 3 to 2", as it
pauses itself, or until the "end" of the step."""


def waits_of(recording: Recording) -> Waits:
    """Return on whom each rank has waited, until the end of the step."""
    last = max(recording.ends)
    return tuple(_of_rank(recording, order, last) for order in recording.orders)


def _of_rank(recording: Recording, order: tuple[int, ...], last: float) -> dict[str, float]:
    waited: dict[str, float] = defaultdict(float)
    free = 0.0
    for number in order:
        for name, time in _blame(recording, number, free, recording.starts[number]):
            waited[name] += time
        free = max(free, recording.ends[number])
    waited[END] = last - free
    return {name: time for name, time in sorted(waited.items(), key=lambda one: -one[1]) if time > 0}


def _blame(recording: Recording, number: int, since: float, until: float) -> Iterator[tuple[str, float]]:
    """Yield for what a computation's rank has waited in the interval, which ends where the computation starts."""
    if until <= since:
        return
    problem = recording.problem
    needed, rank = problem.needs[number], problem.ranks[number]
    source = problem.ranks[needed] if needed >= 0 else rank
    if source == rank:
        yield PAUSE, until - since
        return
    end = recording.ends[needed]
    if until > end:
        yield f"message {source} to {rank}", until - max(end, since)
    yield from _blame_rank(recording, source, recording.places[needed], since, min(until, end))


def _blame_rank(recording: Recording, rank: int, place: int, since: float, until: float) -> Iterator[tuple[str, float]]:
    """Yield what a rank has done in the interval, up to the computation at this place of its order."""
    order = recording.orders[rank]
    while until > since:
        start = recording.starts[order[place]]
        if until > start:
            yield f"rank {rank}", until - max(start, since)
            until = start
        before = max(recording.ends[order[place - 1]] if place else 0.0, since)
        yield from _blame(recording, order[place], before, until)
        until, place = min(until, before), place - 1
