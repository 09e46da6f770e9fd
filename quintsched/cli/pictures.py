"""`quintsched render`: pictures of a plan over time, of measured steps, and of stalls."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.shared_options import (
    AsJson,
    CostsFile,
    RanksShown,
    StepsShown,
    TimeShown,
    emit,
    note,
    read_costs,
    read_plan,
    refuse_input,
    say,
    timed,
)
from quintsched.errors import InputError, UnsoundError, UsageError
from quintsched.files.terminal import percent

if TYPE_CHECKING:
    from quintsched.collectives import CollectiveRun
    from quintsched.plan import Plan
    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.simulation.time_window import TimeWindow
    from quintsched.trace.measured_trace import MeasuredStep
    from quintsched.trace.read_chrome_trace import Profile

PICTURES = (".png", ".svg")
PAGE, EVENTS, COMPRESSED = ".html", ".json", ".json.gz"
BUCKET_BYTES = 25e6
"""Data size for which a collective is drawn: that of a full gradient bucket."""
MOST_READ_BOXES = 250
"""Most computations on a rank of a picture that has room for all their numbers."""


PictureFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="PICTURE", help="A .png or .svg file, an .html page, .json or .json.gz for Perfetto."
    ),
]
TraceFolder = Annotated[
    Path | None,
    typer.Option("--trace", metavar="DIR", help="The traces of a run: draw a measured step under the plan."),
]
Profiles = Annotated[
    list[Path] | None,
    typer.Option("--profiler", metavar="FILE", help="A trace of torch.profiler, merged into the events; repeatable."),
]
OneCollective = Annotated[
    str | None,
    typer.Option("--collective", metavar="NAME", help="Draw the steps of a collective that the plan spells out."),
]
OneStall = Annotated[
    Path | None,
    typer.Option("--stall", metavar="REPORT", help="The report of a run that stalled: draw where its ranks were."),
]


def render(
    plan: Annotated[str | None, typer.Argument(metavar="[PLAN]", help="A plan file; - reads standard input.")] = None,
    output: PictureFile = None,
    costs: CostsFile = None,
    trace: TraceFolder = None,
    steps: StepsShown = None,
    profiler: Profiles = None,
    collective: OneCollective = None,
    stall: OneStall = None,
    ranks: RanksShown = None,
    time: TimeShown = None,
    as_json: AsJson = False,
) -> None:
    """Draw a plan over time, and the activations on each rank.

    A .html file is an interactive page: it pans, zooms and searches, says why a rank is idle, and edits the plan. With
    --trace, draw the measured step with the median makespan below the plan, or those of --steps, on one time axis; the
    plan is then timed by costs from the trace, unless --costs gives others. Events for Perfetto have the plan and the
    steps as processes, and those of --profiler on the same clock. With --stall, draw the positions of ranks in a stall
    report, which contains the plan; the picture is written beside it unless -o is given.
    """
    if stall is not None:
        _draw_stall(stall, output, (plan, costs, trace, steps, profiler, collective, ranks, time), as_json=as_json)
        return
    if plan is None or output is None:
        raise UsageError("render needs a plan and -o PICTURE, or --stall with a report")
    bare = () if collective else (PAGE, EVENTS, COMPRESSED)
    path = picture_path(output, (*PICTURES, PAGE, EVENTS, COMPRESSED), bare=bare)
    refuse_input(path, plan, costs, trace, *(profiler or ()))
    read = read_plan(plan)
    if collective is not None:
        if any(one is not None for one in (ranks, time, steps, profiler)):
            raise UsageError("--ranks, --time, --steps and --profiler are for a plan; a collective is drawn whole")
        _draw_spelled_out(read, collective, path, as_json=as_json)
        return
    if format_of(path) == PAGE and not read.check().sound:
        _show_counter_example(read, read_costs(costs), path)
    simulation, measured = timed(read, read_costs(costs), trace, steps)
    _draw_plan(
        _PlanPicture(simulation, measured, _window(ranks, time, simulation), profiler or ()), path, as_json=as_json
    )


def _draw_plan(drawing: _PlanPicture, path: Path, *, as_json: bool) -> None:
    """Draw a plan's times and measured steps, and report what was drawn."""
    simulation, measured = drawing.simulation, drawing.steps
    drawing.require_fitting(path)
    write_picture(path, lambda: drawing.draw(path))
    if drawing.window is None and path.suffix.lower() in PICTURES and _is_crowded(simulation):
        note(f"{path}: an overview, as the plan is large; --ranks and --time draw a part, a .html page shows all of it")
    if as_json:
        found = {"measured": [step.summary() for step in measured]} if measured else {}
        emit({"picture": str(path), **simulation.summary(), **found})
    else:
        say([f"{path}: {simulation.plan.title}", *(_outcome(simulation, measured) if measured else ())])


def _draw_stall(stall: Path, output: Path | None, others: Sequence[object], *, as_json: bool) -> None:
    """Draw a stall report; raises `UsageError` for other arguments beside it, `InputError` for a broken report."""
    from quintsched.stalls.stall_report import StallReport

    if any(other is not None for other in others):
        raise UsageError("--stall is drawn alone: the report has its plan; leave out the plan and all but -o")
    path = picture_path(stall.with_suffix(".png") if output is None else output, (*PICTURES, PAGE), bare=(PAGE,))
    refuse_input(path, stall)
    report = StallReport.load(stall)

    def draw() -> None:
        from quintsched import viz

        if path.suffix.lower() == PAGE:
            viz.save_untimed(report.plan, path, report=report)
        else:
            viz.render_stall(report, path)

    write_picture(path, draw)
    if as_json:
        emit({"picture": str(path), "title": report.plan.title, "culprits": list(report.ranks)})
    else:
        say([f"{path}: {report.plan.title}", report.words()])


def _draw_spelled_out(plan: Plan, name: str, path: Path, *, as_json: bool) -> None:
    run = _spelled_out(plan, name)
    draw_collective(run, path)
    if as_json:
        emit({"picture": str(path), "title": run.plan.title, **run.summary()})
    else:
        say(f"{path}: {run.plan.title}")


def _spelled_out(plan: Plan, name: str) -> CollectiveRun:
    """Return a collective of a plan, timed for 25 MB on the plan's wire; raises `UsageError` if it has no such one."""
    from quintsched.collectives.collective_timing import simulate

    found = plan.communication.plans.get(name)
    if found is None:
        names = ", ".join(plan.communication.plans) or "none; compile it with --communication ring"
        raise UsageError(f"--collective {name}: the plan spells out {names}")
    return simulate(found, BUCKET_BYTES, plan.communication.wire)


@dataclass(frozen=True)
class _PlanPicture:
    """Picture, page or events of a plan's times and of measured steps."""

    simulation: Simulation
    steps: Sequence[MeasuredStep]
    window: TimeWindow | None
    profiles: Sequence[Path]

    def require_fitting(self, path: Path) -> None:
        """Raise `UsageError` for what the format of a file has no place for."""
        is_events = format_of(path) in (EVENTS, COMPRESSED)
        if self.window is not None and is_events:
            raise UsageError("--ranks and --time are for pictures and pages; a file of events has all of them")
        if self.profiles and not (is_events and self.steps):
            raise UsageError("--profiler is merged with the events of a measured step: --trace DIR -o events.json")

    def draw(self, path: Path) -> None:
        """Write it into a file."""
        from quintsched import viz

        if format_of(path) in (EVENTS, COMPRESSED):
            viz.save_events(self.simulation, self.steps, path, _read_profiles(self.profiles))
        elif format_of(path) == PAGE:
            viz.save_page(self.simulation, self.steps, path, window=self.window)
        elif not self.steps:
            viz.render(self.simulation, path, window=self.window)
        else:
            viz.render_measured(self.simulation, self.steps, path, window=self.window)


def _read_profiles(paths: Sequence[Path]) -> dict[str, Profile]:
    """Return traces of torch.profiler by name; raises `InputError` for files that are none."""
    from quintsched.trace.read_chrome_trace import profiled_rank, read_profile

    found = {}
    for path in paths:
        if (profile := read_profile(path)) is None:
            raise InputError(f"{path}: not a trace of torch.profiler, which has a list of traceEvents")
        found[f"rank {profiled_rank(profile, path)}, {path.name}"] = profile
    return found


def _show_counter_example(plan: Plan, costs: Costs | None, path: Path) -> None:
    """Write the page of a plan that is not sound; always raises `UnsoundError`, with the counter-example."""
    from quintsched import viz

    write_picture(path, lambda: viz.save_untimed(plan, path, costs))
    raise UnsoundError(f"{plan.check().explain()}\n{path} shows it")


def _window(ranks: str | None, time: str | None, simulation: Simulation) -> TimeWindow | None:
    """Return the part of a plan that is asked for; None for all of it."""
    from quintsched.simulation.time_window import TimeWindow

    return None if ranks is None and time is None else TimeWindow.parse(ranks, time, simulation)


def _is_crowded(simulation: Simulation) -> bool:
    """Whether the boxes of a whole picture are too narrow for their numbers."""
    from quintsched.ir.instruction_set import COMPUTING

    columns = simulation.plan.columns
    return int(columns.are(*COMPUTING).sum()) > MOST_READ_BOXES * columns.num_ranks


def draw_collective(run: CollectiveRun, output: Path) -> None:
    """Draw a spelled-out collective; raises `UsageError` as `picture_path` and `write_picture` do."""
    path = picture_path(output)

    def draw() -> None:
        from quintsched import viz

        viz.render_collective(run, path)

    write_picture(path, draw)


def _outcome(simulation: Simulation, steps: Sequence[MeasuredStep]) -> list[str]:
    named: list[tuple[str, Simulation | MeasuredStep]] = [("planned", simulation)]
    named += [(f"measured, step {step.number}", step) for step in steps]
    return [f"{name}: makespan {run.makespan:g} {run.unit}, bubble {percent(run.bubble)}" for name, run in named]


def format_of(path: Path) -> str:
    """Return the ending that says what a file contains."""
    return COMPRESSED if path.name.lower().endswith(COMPRESSED) else path.suffix.lower()


def picture_path(path: Path, formats: Sequence[str] = PICTURES, *, bare: Sequence[str] = ()) -> Path:
    """Return the path if its format is one of these; those in `bare` need no matplotlib. Raises `UsageError`."""
    suffix = format_of(path)
    if suffix not in formats:
        raise UsageError(f"{path}: cannot draw this format; name it {' or '.join(formats)}")
    if suffix not in bare and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("pictures need matplotlib; pip install 'quintsched[viz]'")
    return path


def comparison_path(path: Path) -> Path:
    """Return the path if several plans can be drawn into it beside each other. Raises `UsageError`."""
    return picture_path(path, (*PICTURES, PAGE), bare=(PAGE,))


def write_comparison(simulations: Sequence[Simulation], path: Path) -> None:
    """Draw several plans into a picture or a page; raises `UsageError` if it cannot be written."""
    from quintsched import viz

    draw = viz.save_compared if format_of(path) == PAGE else viz.compare
    write_picture(path, lambda: draw(simulations, path))


def write_picture(path: Path, draw: Callable[[], object]) -> None:
    """Draw; raises `UsageError` if the file cannot be written."""
    try:
        draw()
    except OSError as error:
        raise UsageError(f"{path}: cannot write the picture: {error.strerror or error}") from error
