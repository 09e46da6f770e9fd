"""`quintsched simulate`, `compare` and `whatif`: simulated times and memory of plans, and of recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.shared_options import (
    AsJson,
    CostsFile,
    Effort,
    MemoryCap,
    Microbatches,
    PlanFile,
    Seconds,
    Seed,
    check_outputs,
    emit,
    read_costs,
    read_plan,
    read_schedule,
    read_trace,
    refuse_input,
    say,
    simulate_plan,
    write_costs,
)
from quintsched.errors import UsageError, counted
from quintsched.files.terminal import percent
from quintsched.files.terminal_progress import ProgressLine, progress

if TYPE_CHECKING:
    from quintsched.plan import Plan
    from quintsched.schedules import Schedule
    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.solve.order_search import PlacementSearch

MOST_STEPS = 12
"""Number of computations of a critical path that are printed at its beginning, and at its end."""


Bars = Annotated[bool, typer.Option("--bars", help="Show a bar for each rank: computing, and idle time by its cause.")]
FROM_TRACE = "from-trace"
SAME = "same"


def simulate(
    plan: PlanFile,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The traces of a run, for --costs from-trace.")
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="A JSON file of costs, or from-trace; default: unit costs.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="COSTS", help="Write the costs that were used to this file."),
    ] = None,
    per_microbatch: Annotated[
        bool, typer.Option("--per-microbatch", help="With from-trace: factors for each microbatch and slice too.")
    ] = False,
    bars: Bars = False,
    as_json: AsJson = False,
) -> None:
    """Time a plan under a cost model.

    Prints makespan, both bubbles, peak activations, and the critical path; with --bars where each rank's time goes.
    `--costs from-trace DIR` takes the measured times of a run's instructions, as medians over the recorded steps.
    """
    from quintsched.text.busy_share_bars import time_bars

    refuse_input(output, plan, directory, None if costs == FROM_TRACE else costs)
    read = read_plan(plan)
    used = _read_costs(costs, directory, read, per_microbatch)
    simulation = simulate_plan(read, used)
    if output is not None:
        from quintsched.simulation.costs import Costs

        write_costs(used or Costs(), output)
    if as_json:
        emit({**simulation.summary(), **(_times(simulation) if bars else {})})
    else:
        say([*_describe(simulation), *(["", *time_bars(simulation)] if bars else ())])


def _times(simulation: Simulation, memory_cap: float | None = None) -> dict[str, object]:
    """Return where the time of each rank goes, as JSON data."""
    from quintsched.simulation.idle_time import times_of_ranks

    times = times_of_ranks(simulation, memory_cap)
    return {"times": [{"parts": dict(time.parts), "waits": dict(time.waits)} for time in times]}


def _read_costs(costs: str | None, directory: Path | None, plan: Plan, per_microbatch: bool) -> Costs | None:
    """Return the costs of a file, or those measured by the traces in a directory."""
    if costs == FROM_TRACE:
        if directory is None:
            raise UsageError("--costs from-trace needs the directory of the traces: --costs from-trace DIR")
        return read_trace(directory, plan).costs(per_microbatch=per_microbatch)
    if directory is not None:
        raise UsageError(f"{directory}: a directory of traces goes with --costs from-trace only")
    if per_microbatch:
        raise UsageError("--per-microbatch goes with --costs from-trace only; a costs file says it itself")
    return read_costs(None if costs is None else Path(costs))


def _describe(simulation: Simulation) -> Iterator[str]:
    from quintsched.text.plan_listing import table

    peaks = "  ".join(f"{rank}: {peak:g}" for rank, peak in enumerate(simulation.peak_activations))
    rows = [
        ("makespan", f"{simulation.makespan:g}", "until the last instruction ends"),
        ("bubble", percent(simulation.bubble), "of all ranks' time until the makespan is idle"),
        ("span", f"{simulation.span:g}", "longest time from a rank's first forward to its last weight gradient"),
        ("span bubble", percent(simulation.span_bubble), "of that rank's span is idle (zero-bubble papers' measure)"),
    ]
    yield f"{simulation.plan.title}; time in {simulation.unit}"
    yield from table(("", "", ""), rows)[1:]
    if any(simulation.exchange):
        exchange = "  ".join(f"{rank}: {time:g}" for rank, time in enumerate(simulation.exchange))
        yield f"exchanges inside stages by pipeline rank, while it computes nothing: {exchange}"
    yield f"peak activations by pipeline rank, in microbatches of a whole rank: {peaks}"
    if any(simulation.peak_host):
        peaks = "  ".join(f"{rank}: {peak:g}" for rank, peak in enumerate(simulation.peak_host))
        yield f"peak in the host's memory by pipeline rank, in microbatches of a whole rank: {peaks}"
    if any(simulation.peak_state):
        pairs = enumerate(zip(simulation.peak_state, simulation.peak_memory, strict=True))
        peaks = "  ".join(f"{rank}: {state:g} ({everything:g})" for rank, (state, everything) in pairs)
        yield f"peak state by pipeline rank, weights, gradients and optimizer (and with activations): {peaks}"
    yield f"critical path: {_path(simulation)}"


def _path(simulation: Simulation) -> str:
    """Return the critical path as `rank 0: F0 F1 → rank 1: …`, without its middle if it is long."""
    from quintsched.ir.instruction_set import short

    path = simulation.critical_path
    several = len(simulation.plan.stage_to_pp) > simulation.plan.mesh.pp
    left_out = len(path) - 2 * MOST_STEPS
    shown = [path] if left_out <= 0 else [path[:MOST_STEPS], path[-MOST_STEPS:]]
    parts = []
    for part in shown:
        for rank, places in groupby(part, key=lambda place: place.rank):
            steps = (short(simulation.plan.programs[rank][p.index], with_stage=several) for p in places)
            parts.append(f"rank {rank}: {' '.join(steps)}")
        parts.append(f"… {left_out} more …")
    return " → ".join(parts[:-1]) or "nothing takes time"


def compare(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Schedules, or my_file.py:my_schedule.")],
    pp: Annotated[int, typer.Option("--pp", metavar="P", help="Pipeline ranks.")],
    microbatches: Microbatches,
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", metavar="V", help="Stages per rank, for the schedules that take more than one."),
    ] = None,
    slices: Annotated[
        int, typer.Option("--slices", metavar="Q", help="Slices of a microbatch, for the schedules that take them.")
    ] = 1,
    costs: CostsFile = None,
    memory_cap: MemoryCap = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PICTURE", help="Draw them too: a .png or .svg file, or an .html page."),
    ] = None,
    bars: Bars = False,
    as_json: AsJson = False,
) -> None:
    """Compare the makespan, bubbles and memory of schedules.

    The picture has each schedule over time, the activations of its ranks, and where their time goes; a .html file is an
    interactive page, with what differs. Schedules that search do so under the costs and the memory cap.
    """
    from quintsched.cli.pictures import comparison_path, write_comparison
    from quintsched.text.busy_share_bars import time_bars

    refuse_input(output, costs, *names)
    path = None if output is None else comparison_path(output)
    request = _Request(pp, microbatches, chunks, slices, read_costs(costs), memory_cap)
    simulations, refused = _simulate_all(names, request)
    if not simulations:
        raise UsageError("\n".join(["none of these takes the shape", *refused.values()]))
    if path is not None:
        write_comparison(simulations, path)
    if as_json:
        refusals = [{"schedule": name, "reason": reason} for name, reason in refused.items()]
        found = [one.summary() | (_times(one, memory_cap) if bars else {}) for one in simulations]
        emit({"schedules": found, "refused": refusals})
    else:
        say(_comparison(simulations, refused))
        for simulation in simulations if bars else ():
            say(["", simulation.plan.schedule.name, *time_bars(simulation, memory_cap)])


@dataclass(frozen=True)
class _Request:
    """Arguments shared by all schedules of a comparison."""

    pp: int
    microbatches: int
    chunks: int | None
    slices: int
    costs: Costs | None
    memory_cap: float | None

    def compile(self, schedule: Schedule) -> Plan:
        """Compile a schedule with those arguments that it takes."""
        from quintsched.compiler import compile
        from quintsched.ir.mesh import Mesh

        return compile(
            schedule,
            mesh=Mesh(pp=self.pp),
            microbatches=self.microbatches,
            chunks=self.chunks if schedule.max_chunks > schedule.min_chunks else None,
            slices=self.slices if schedule.max_slices > 1 else 1,
            costs=self.costs if schedule.searches else None,
            memory_cap=self.memory_cap if schedule.searches else None,
        )


def _simulate_all(names: list[str], request: _Request) -> tuple[list[Simulation], dict[str, str]]:
    """Return the simulations of the schedules that take the shape, and the refusals of the others."""
    simulations: list[Simulation] = []
    refused: dict[str, str] = {}
    schedules = [(name, read_schedule(name)) for name in dict.fromkeys(names)]
    with progress("comparing") as found:
        for done, (name, schedule) in enumerate(schedules):
            found.show_done(done, len(schedules), name)
            try:
                plan = request.compile(schedule)
            except UsageError as error:
                refused[name] = str(error)
            else:
                simulations.append(plan.simulate(request.costs))
    return simulations, refused


def _comparison(simulations: list[Simulation], refused: dict[str, str]) -> Iterator[str]:
    from quintsched.text.plan_listing import table

    first = simulations[0]
    yield f"{first.plan.mesh}, {counted(first.plan.schedule.microbatches, 'microbatch')}; time in {first.unit}"
    header = ("schedule", "chunks", "slices", "makespan", "bubble", "span bubble", "peak activations")
    rows = [
        (
            simulation.plan.schedule.name,
            str(simulation.plan.schedule.chunks),
            str(simulation.plan.schedule.slices),
            f"{simulation.makespan:g}",
            percent(simulation.bubble),
            percent(simulation.span_bubble),
            f"{max(simulation.peak_activations):g}",
        )
        for simulation in simulations
    ]
    yield from table(header, rows)
    yield from (f"left out: {reason}" for reason in refused.values())


Recorded = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="Directory of traces of a run: by this project, Primus or torch.profiler."),
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Step to analyse; default: the one of median time.")
]
SameCap = Annotated[
    str,
    typer.Option("--memory-cap", metavar="X", help="Most activations on a rank, in microbatches; same: as recorded."),
]


def whatif(
    trace: Recorded,
    step: Step = None,
    memory_cap: SameCap = SAME,
    recompute: Annotated[
        str, typer.Option("--recompute", metavar="STAGES", help="Stages that recompute: the same, or auto.")
    ] = SAME,
    effort: Effort = 4,
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="Write the better plan there, with backwards as the run had them."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Write its lower bound, for `certify`.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PICTURE", help="Draw both timelines: a .png or .svg file, or an .html page."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell how much of a measured step was avoidable, and by what.

    Rebuilds plan and costs from a trace and replays them. Then says what each cause of idle time costs, on whom each
    rank has waited, and how much faster the best order in equal memory is, with a certified bound. What the plan does
    to need less memory (recompute, offload, lend) it goes on to do.
    """
    from quintsched.cli.pictures import comparison_path, write_comparison
    from quintsched.solve.recorded import load_run, what_if
    from quintsched.solve.recorded.whatif import in_words

    path = None if output is None else comparison_path(output)
    check_outputs({"-o": path, "--plan": plan, "--certificate": certificate}, trace)
    with progress("reading the trace") as shown:
        told = _shown_attempts(shown, seconds)
        found = what_if(
            load_run(trace),
            step=step,
            memory_cap=None if memory_cap == SAME else _number(memory_cap),
            recompute=recompute,
            effort=effort,
            seconds=seconds,
            seed=seed,
            told=told,
        )
    best = found.better[found.alike]
    if plan is not None:
        best.plan.save(plan)
    if certificate is not None:
        best.certificate.save(certificate)
    if path is not None:
        write_comparison(found.simulations, path)
    if as_json:
        emit(found.summary())
    else:
        say(in_words(found))


def _shown_attempts(shown: ProgressLine, seconds: float) -> Callable[[PlacementSearch, float], None]:
    """Return what shows the attempts of a search that ends after so many seconds."""

    def told(attempt: PlacementSearch, taken_s: float) -> None:
        shown.show_done(taken_s, seconds, f"{attempt.value:g} at most, {attempt.bound.value:g} at least")

    return told


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--memory-cap {text}: give a number of microbatches, or {SAME}") from None
