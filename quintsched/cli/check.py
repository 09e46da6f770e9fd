"""`quintsched check`: prove a plan, or a schedule over many shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.shared_options import MICROBATCHES, AsJson, emit, read_plan, read_schedule, say
from quintsched.errors import InputError, UsageError, counted
from quintsched.files.terminal_progress import progress

if TYPE_CHECKING:
    from quintsched.check_many_shapes import SweepOutcome
    from quintsched.verify.soundness import Verdict

SPAN = "For a schedule: a number or a range, both ends in."


def check(
    target: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, - or my_file.py:my_schedule.")],
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="The transport under which a plan must not deadlock.")
    ] = "channel",
    memory_cap: Annotated[
        float | None, typer.Option("--memory-cap", metavar="X", help="Most activations on a rank, in microbatches.")
    ] = None,
    pp: Annotated[str | None, typer.Option("--pp", metavar="A..B", help=f"Pipeline ranks. {SPAN}")] = None,
    microbatches: Annotated[
        str | None, typer.Option("--microbatches", "-m", metavar="A..B", help=f"{MICROBATCHES}. {SPAN}")
    ] = None,
    chunks: Annotated[
        str | None, typer.Option("--chunks", metavar="A..B", help=f"Stages per pipeline rank. {SPAN}")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove a plan sound, or show the counter-example.

    For a user-defined schedule, every shape of the ranges is compiled and proved; without --chunks with the fewest that
    it takes, and the next two.
    """
    from quintsched.graph.transport_ordering_rules import find_profile
    from quintsched.import_user_code import names_file

    find_profile(profile)
    if names_file(target):
        sound = _check_schedule(target, pp or "1..4", microbatches or "1..8", chunks, memory_cap, as_json)
    elif pp or microbatches or chunks:
        raise UsageError("--pp, --microbatches and --chunks are for a schedule (my_file.py:name); a plan has its shape")
    else:
        sound = _check_plan(target, profile, memory_cap, as_json)
    if not sound:
        raise typer.Exit(1)


def _check_plan(file: str, profile: str, memory_cap: float | None, as_json: bool) -> bool:
    try:
        plan = read_plan(file)
        with progress(f"proving {counted(plan.num_instructions, 'instruction')}"):
            verdict = plan.check(profile=profile, memory_cap=memory_cap)
    except InputError as error:
        if as_json:
            emit({"sound": False, "findings": [{"point": "well-formed", "message": str(error)}]})
        raise
    if as_json:
        emit(report(verdict, profile))
    else:
        say([verdict.explain(), *_buffers(verdict), *_capture(verdict)])
    return verdict.sound


def _buffers(verdict: Verdict) -> Iterator[str]:
    """Yield the number of message buffers of a sound plan, as text."""
    from quintsched.graph.transport_ordering_rules import find_profile

    receives, sends = verdict.slots
    if sum(receives):
        posted = "ahead" if find_profile(verdict.profile).matches_by_tag else "at their places"
        yield (
            f"messages posted {posted} need {max(receives)} receive and {max(sends)} send slots on the fullest rank, "
            f"{sum(receives)} and {sum(sends)} on all pipeline ranks"
        )


def _capture(verdict: Verdict) -> Iterator[str]:
    """Yield whether a CUDA graph can capture the step of a sound plan for one rank; nothing for several ranks."""
    from quintsched.verify.cuda_graph_capture import capture_obstacles

    if verdict.sound and verdict.plan.mesh.size == 1:
        obstacles = capture_obstacles(verdict.plan)
        yield f"no CUDA graph can hold a step: {'; '.join(obstacles)}" if obstacles else "a CUDA graph can hold a step"


def report(verdict: Verdict, profile: str) -> dict[str, Any]:
    """Return a verdict as JSON data."""
    from quintsched.verify.cuda_graph_capture import capture_obstacles

    return {
        "title": verdict.plan.title,
        "sound": verdict.sound,
        "profile": profile,
        "profiles": verdict.profiles,
        "why_not": {name: [wait.message for wait in waits[1:]] for name, waits in verdict.cycles.items()},
        **({"capture_obstacles": capture_obstacles(verdict.plan)} if verdict.sound else {}),
        "instructions": verdict.plan.num_instructions,
        "peak_activations": list(verdict.peak_activations),
        "peak_receives": list(verdict.peak_receives),
        "receive_slots": list(verdict.slots.receive),
        "send_slots": list(verdict.slots.send),
        **({"blocks_per_stage": list(blocks)} if (blocks := verdict.plan.blocks_per_stage) else {}),
        "findings": [
            {"point": f.point.value, "message": f.message, "rank": f.rank, "index": f.index} for f in verdict.findings
        ],
    }


def _check_schedule(
    name: str, pp: str, microbatches: str, chunks: str | None, memory_cap: float | None, as_json: bool
) -> bool:
    from quintsched.check_many_shapes import Status, prove

    schedule = read_schedule(name)
    shapes = {
        "pp": read_span(pp, "--pp"),
        "microbatches": read_span(microbatches, "--microbatches"),
        "chunks": schedule.several_chunks if chunks is None else read_span(chunks, "--chunks"),
    }
    number, outcomes = prod(map(len, shapes.values())), []
    with progress(f"proving {number} shapes") as found:
        for outcome in prove(schedule, **shapes, memory_cap=memory_cap):
            outcomes.append(outcome)
            found.show_done(len(outcomes), number, f"pp={outcome.pp}, {counted(outcome.microbatches, 'microbatch')}")
    if all(outcome.status is Status.REFUSED for outcome in outcomes):
        raise UsageError(f"the schedule takes none of these {len(outcomes)} shapes; {outcomes[0].reason}")
    sound = not any(outcome.status is Status.UNSOUND for outcome in outcomes)
    if as_json:
        emit({"schedule": schedule.name, "sound": sound, "shapes": [vars(outcome) for outcome in outcomes]})
    else:
        say(_describe(schedule.name, outcomes))
    return sound


def read_span(text: str, option: str) -> range:
    """Parse "4" or "2..8", both ends included; raises `UsageError`."""
    first, dots, last = text.partition("..")
    ends = [first, last if dots else first]
    if not all(end.isdecimal() and 1 <= len(end) <= 9 for end in ends):
        raise UsageError(f"{option}: cannot read {text!r}; write a number or a range, like 4 or 2..8")
    low, high = map(int, ends)
    if not 1 <= low <= high:
        raise UsageError(f"{option}: {text!r} is an empty range; it runs from at least 1 upwards")
    return range(low, high + 1)


def _describe(name: str, outcomes: Sequence[SweepOutcome]) -> list[str]:
    from quintsched.check_many_shapes import Status
    from quintsched.text.plan_listing import table

    count = {status: sum(outcome.status is status for outcome in outcomes) for status in Status}
    head = f"{name}: of {counted(len(outcomes), 'shape')} {', '.join(f'{count[status]} {status}' for status in Status)}"
    lines = [head, *table(("pp", "chunks", *(f"{status} at microbatches" for status in Status)), _rows(outcomes))]
    refused = next((outcome for outcome in outcomes if outcome.status is Status.REFUSED), None)
    failing = next((outcome for outcome in outcomes if outcome.status is Status.UNSOUND), None)
    if refused:
        lines.append(f"refused by the schedule itself, such as: {refused.reason}")
    if failing:
        shape = f"pp={failing.pp}, {counted(failing.chunks, 'chunk')}, {counted(failing.microbatches, 'microbatch')}"
        lines += ["", f"the smallest shape that fails: {shape}", failing.reason]
    return lines


def _rows(outcomes: Sequence[SweepOutcome]) -> list[tuple[str, ...]]:
    from quintsched.check_many_shapes import Status

    found: dict[tuple[int, int], dict[Status, list[int]]] = {}
    for outcome in sorted(outcomes, key=lambda o: (o.pp, o.chunks, o.microbatches)):
        row = found.setdefault((outcome.pp, outcome.chunks), {status: [] for status in Status})
        row[outcome.status].append(outcome.microbatches)
    return [(str(pp), str(chunks), *map(runs, row.values())) for (pp, chunks), row in found.items()]


def runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: [1, 2, 3, 5] as "1..3, 5", "-" for none."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("..".join(map(str, ends)) for ends in found) or "-"
