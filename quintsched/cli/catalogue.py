"""`quintsched schedules`: what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintsched.cli.output import AsJson, emit, say

if TYPE_CHECKING:
    from quintsched.schedules import Schedule

LEGEND = (
    "P pipeline ranks, M microbatches, v chunks, r the rank; F, I, W: the time of a forward and of the two halves of",
    "a backward (input, weights) of a whole rank's layers. Bubble: the time beyond M(F+I+W), or M·F forward only.",
    "Memory: most activations on rank r, in microbatches of a whole rank.",
)


def schedules(as_json: AsJson = False) -> None:
    """List the schedules, with bubble and memory formulas."""
    from quintsched.grid import table
    from quintsched.schedules import all_schedules

    if as_json:
        emit([_entry(found) for found in all_schedules()])
        return
    header = ("schedule", "mode", "chunks", "bubble", "memory", "what it does")
    rows = [(_names(s), s.mode, s.chunks_text, s.bubble, s.memory, s.summary) for s in all_schedules()]
    say([*table(header, rows), "", *LEGEND])


def _names(schedule: Schedule) -> str:
    return ", ".join((schedule.name, *schedule.aliases))


def _entry(schedule: Schedule) -> dict[str, object]:
    return {
        "name": schedule.name,
        "aliases": list(schedule.aliases),
        "mode": schedule.mode,
        "chunks": [schedule.min_chunks, schedule.max_chunks],
        "bubble": schedule.bubble,
        "memory": schedule.memory,
        "summary": schedule.summary,
    }
