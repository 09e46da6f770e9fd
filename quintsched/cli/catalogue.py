"""`quintsched schedules`: list of the registered schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quintsched.cli.output import AsJson, emit, say

if TYPE_CHECKING:
    from quintsched.schedules import Schedule

LEGEND = (
    "P pipeline ranks, M microbatches, v chunks, q slices, r the rank; F, I, W: the time of a forward and of the two",
    "halves of a backward (input, weights) of a whole rank's layers. Bubble: the makespan's time beyond M(F+I+W), or",
    "M·F forward only. Memory: most activations on rank r, in microbatches of a whole rank.",
)


def schedules(as_json: AsJson = False) -> None:
    """List the schedules, with bubble and memory formulas."""
    from quintsched.schedules import all_schedules

    if as_json:
        emit([_entry(found) for found in all_schedules()])
        return
    say([line for found in all_schedules() for line in _describe(found)])
    say(LEGEND)


def _describe(schedule: Schedule) -> Iterator[str]:
    yield f"{', '.join((schedule.name, *schedule.aliases))}: {schedule.summary or 'no summary'}"
    yield f"    bubble {schedule.bubble or 'not stated'};  memory {schedule.memory or 'not stated'}"
    yield f"    {', '.join(_shape(schedule))}"
    yield ""


def _shape(schedule: Schedule) -> Iterator[str]:
    """Yield the parameters that the schedule takes, as text."""
    yield f"{_name(schedule.placement)} placement"
    yield f"{schedule.chunks_text} chunk{'' if schedule.max_chunks == 1 else 's'}"
    if schedule.max_slices > 1:
        yield "1 or more slices"
    if words := _constraint(schedule):
        yield words
    if schedule.searches:
        yield "searches under costs and a memory cap"
    if schedule.mode == "forward":
        yield "forward only"


def _name(function: object) -> str:
    return str(getattr(function, "__name__", "its own"))


def _constraint(schedule: Schedule) -> str:
    """Return the constraint as text: the first line of its docstring."""
    return (schedule.constraint.__doc__ or "").partition("\n")[0].rstrip(".")


def _entry(schedule: Schedule) -> dict[str, object]:
    return {
        "name": schedule.name,
        "aliases": list(schedule.aliases),
        "mode": schedule.mode,
        "placement": _name(schedule.placement),
        "chunks": [schedule.min_chunks, schedule.max_chunks],
        "slices": [1, schedule.max_slices],
        "constraint": _constraint(schedule),
        "searches": schedule.searches,
        "bidirectional": schedule.bidirectional,
        "bubble": schedule.bubble or None,
        "memory": schedule.memory or None,
        "summary": schedule.summary,
    }
