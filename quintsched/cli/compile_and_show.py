"""`quintsched schedules`, `compile` and `show`: list schedules, compile a plan, and print it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.request_options import AXIS_OPTIONS, option_of, read_request, taking_settings
from quintsched.cli.run_and_verify import Overrides, plan_of_job
from quintsched.cli.shared_options import (
    AsJson,
    CostsFile,
    PlanFile,
    RanksShown,
    StepsShown,
    TimeShown,
    emit,
    note,
    read_costs,
    read_plan,
    refuse_input,
    say,
    terminal_width,
    timed,
)
from quintsched.errors import UsageError, counted, suggest
from quintsched.files.terminal import percent
from quintsched.files.terminal_progress import ProgressLine, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from quintsched.plan import Plan
    from quintsched.schedules import Schedule
    from quintsched.simulation.simulator import Simulation
    from quintsched.trace.measured_trace import MeasuredStep

LEGEND = (
    "P pipeline ranks, M microbatches, v chunks, q slices, r the rank; F, I, W: the time of a forward and of the two",
    "halves of a backward (input, weights) of a whole rank's layers. Bubble: the makespan's time beyond M(F+I+W), or",
    "M·F forward only. Memory: most activations on rank r, in microbatches of a whole rank.",
)

PlanOutput = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="PLAN", help="The plan file (.qplan: compressed); default: standard output."
    ),
]
PrintAfter = Annotated[
    str | None,
    typer.Option(
        "--print-after", metavar="PASS", help="Write the plan after this pass, or after all, to standard error."
    ),
]


@taking_settings
def compile(
    settings: dict[str, Any],
    job: Annotated[Path | None, typer.Argument(metavar="[JOB]", help="A job file: the plan that its run has.")] = None,
    overrides: Overrides = None,
    output: PlanOutput = None,
    print_after: PrintAfter = None,
    as_json: AsJson = False,
) -> None:
    """Compile a plan and prove it sound.

    From --schedule, --mesh (or the sizes of its axes) and --microbatches, or from a job file: the plan is then the one
    that `quintsched run` makes of the file, with the same --set.
    """
    from quintsched.cli.check import report

    refuse_input(output, settings["costs"], settings["schedule"], job)
    if job is None:
        plan = _compiled(settings, overrides, output, print_after)
    else:
        _require_none_beside_job(settings, print_after)
        plan = plan_of_job(job, overrides)
    verdict = plan.check(profile="blocking")
    if output is None:
        note(f"{plan.title}\n{verdict.explain()}")
        typer.echo(plan.to_json(), nl=False)
        return
    plan.save(output)
    if as_json:
        emit({"plan": str(output), **report(verdict, "blocking")})
    else:
        say(f"{output}: {plan.title}\n{verdict.explain()}")


def _compiled(
    settings: dict[str, Any], overrides: Sequence[str] | None, output: Path | None, print_after: str | None
) -> Plan:
    """Compile what the options say."""
    from quintsched.compiler import compile_request

    if overrides:
        raise UsageError("--set overrides a setting of a job file; name the file, or give the plan's own options")
    request = read_request(settings, after=_watch(print_after))
    if print_after is not None:  # whose lines stand where the progress would
        return compile_request(request, partial(_require_room, None, output))
    with progress("compiling") as found:
        return compile_request(request, partial(_require_room, found, output))


def _require_room(found: ProgressLine | None, output: Path | None, instructions: int, size: int) -> None:
    """Show how large the plan will be at least; raises `UsageError` where there is no room for it."""
    from quintsched.formats.plan_file import require_room

    if found is not None:
        found.now(f"compiling {counted(instructions, 'instruction')} or more")
    if output is not None:
        require_room(output, instructions, size, least="at least ")


def _require_none_beside_job(settings: dict[str, Any], print_after: str | None) -> None:
    """Raise `UsageError` where an option beside a job file says what the file does."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        name = "mesh" if given[0] in AXIS_OPTIONS else given[0]
        raise UsageError(
            f"{option_of(given[0])} beside a job file: its section parallel defines the plan; "
            f"change that, or write --set parallel.{name}=…"
        )
    if print_after is not None:
        raise UsageError("--print-after is for a plan that the options say; leave out the job file, or --print-after")


def _watch(print_after: str | None) -> Callable[[str, Plan], None] | None:
    """Return the observer that prints the plan after a pass, or after each; raises `UsageError` for an unknown one."""
    from quintsched.compiler import ORDER
    from quintsched.passes import FORWARD_PASSES, TRAIN_PASSES
    from quintsched.text.plan_listing import listing

    if print_after is None:
        return None
    names = [ORDER, *dict.fromkeys(step.name for step in (*TRAIN_PASSES, *FORWARD_PASSES)), "all"]
    if print_after not in names:
        raise UsageError(f"--print-after: unknown pass {print_after!r}{suggest(print_after, names)}")

    def watch(name: str, plan: Plan) -> None:
        if print_after in (name, "all"):
            note(f"== after {name}: {plan.title}")
            for rank, program in enumerate(plan.programs):
                note("\n".join([f"pipeline rank {rank}", *(f"  {line}" for line in listing(program))]))

    return watch


def show(
    plan: PlanFile,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="Show this global rank's list.")] = None,
    groups: Annotated[
        bool, typer.Option("--groups", help="Show the mesh and its process groups; with --rank those of one rank.")
    ] = False,
    costs: CostsFile = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="The traces of a run: show measured steps.")
    ] = None,
    steps: StepsShown = None,
    ranks: RanksShown = None,
    time: TimeShown = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan's grid over time, one rank's list, or its groups.

    With --trace, the grid of the measured step of median length follows, or those of --steps. Of a plan that is too
    large to read, the grid shows the first ranks and times; --ranks and --time show others.
    """
    found = read_plan(plan)
    if groups or rank is not None:
        grid = {"costs": costs, "trace": trace, "steps": steps, "ranks": ranks, "time": time}
        for name, value in grid.items():
            if value is not None:
                raise UsageError(f"--{name} is for the grid over time; a rank's list and groups take none")
    if groups:
        _show_groups(found, rank, as_json)
    elif rank is None:
        _show_grid(*timed(found, read_costs(costs), trace, steps), (ranks, time), as_json)
    else:
        _show_rank(found, rank, as_json)


def _show_groups(plan: Plan, rank: int | None, as_json: bool) -> None:
    from quintsched.text.process_groups import describe_groups, describe_rank, groups_data, rank_data

    if as_json:
        emit({"title": plan.title, **(groups_data(plan) if rank is None else rank_data(plan, rank))})
    else:
        say([plan.title, *(describe_groups(plan) if rank is None else describe_rank(plan, rank))])


def _show_grid(
    simulation: Simulation,
    steps: Sequence[MeasuredStep],
    part: tuple[str | None, str | None],
    as_json: bool,
) -> None:
    from quintsched.simulation.time_grid import readable_window, shortest, time_grid
    from quintsched.simulation.time_window import TimeWindow

    plan, column = simulation.plan, shortest(simulation)
    asked = any(one is not None for one in part)
    window = TimeWindow.parse(*part, simulation) if asked or as_json else readable_window(simulation)
    if as_json:
        grids = [{**step.summary(), "grid": time_grid(step, step=column)} for step in steps]
        grid = time_grid(simulation, window=window)
        measured = {"measured": grids} if steps else {}
        emit({"title": plan.title, "makespan": simulation.makespan, "grid": grid, **measured})
        return
    unit = "forwards" if simulation.unit == "forward" else simulation.unit
    title = f"{plan.title}: {simulation.makespan:g} {unit} long, bubble {percent(simulation.bubble)}"
    say([title, *time_grid(simulation, terminal_width(), window)])
    for step in steps:
        figures = f"makespan {step.makespan:.4g} {step.unit}, bubble {percent(step.bubble)}"
        shown = window if asked else readable_window(step)
        say(["", f"measured, step {step.number}: {figures}", *time_grid(step, terminal_width(), shown, column)])
    if not window.is_whole(simulation):
        note(f"{window.words(simulation)}{'' if asked else '; --ranks and --time show others'}")


def _show_rank(plan: Plan, rank: int, as_json: bool) -> None:
    from quintsched.formats.plan_json import encode
    from quintsched.text.plan_listing import listing

    program, where = plan.program(rank), plan.mesh.coordinates(rank)
    if as_json:
        emit({"title": plan.title, "rank": rank, "coordinates": where, "program": [encode(i) for i in program]})
        return
    place = ", ".join(f"{axis}={at}" for axis, at in where.items())
    say([f"{plan.title}", f"rank {rank}{f' ({place})' if place else ''}; peers are global ranks", *listing(program)])


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
