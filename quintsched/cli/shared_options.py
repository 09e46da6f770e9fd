"""Shared code of the commands: options, reading of plans and costs, output as text or JSON."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.errors import UsageError, counted
from quintsched.files.terminal import shown, shown_json, write_line
from quintsched.files.terminal_progress import progress

if TYPE_CHECKING:
    from quintsched.plan import Plan
    from quintsched.schedules import Schedule
    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.trace.measured_trace import MeasuredStep, Trace

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file; - reads standard input.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, and nothing else.")]
RanksShown = Annotated[
    str | None, typer.Option("--ranks", metavar="A..B", help="Show these pipeline ranks only: 0..7.")
]
TimeShown = Annotated[str | None, typer.Option("--time", metavar="T..U", help="Show this time only: 10..50.")]
StepsShown = Annotated[
    str | None, typer.Option("--steps", metavar="N..M", help="Show these steps of the trace: 7, or 4..7.")
]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", metavar="FILE", help="A JSON file of costs; default: unit costs.")
]
MICROBATCHES = "How many microbatches each replica's share of the batch is cut into"
"""Meaning of `--microbatches`, in every command."""
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", metavar="M", help=f"{MICROBATCHES}.")]
MemoryCap = Annotated[
    float | None,
    typer.Option(
        "--memory-cap", metavar="X", help="For schedules that search: most activations on a rank, in microbatches."
    ),
]
Effort = Annotated[int, typer.Option("--effort", metavar="N", help="Work of the search.")]
Seconds = Annotated[float, typer.Option("--seconds", metavar="S", help="End after this time at the latest.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the search.")]


def say(lines: str | Iterable[str]) -> None:
    """Write lines to standard output."""
    typer.echo(shown(lines if isinstance(lines, str) else "\n".join(lines)))


def note(line: str) -> None:
    """Write a line to standard error."""
    write_line(line)


def emit(data: object) -> None:
    """Write data as JSON to standard output."""
    typer.echo(shown_json(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)))


def read_plan(file: str) -> Plan:
    """Read a plan file, or standard input for "-"."""
    from quintsched.files.atomic import read_whole
    from quintsched.formats.plan_file import MOST_PLAN_BYTES, loads
    from quintsched.plan import Plan

    with progress(f"reading {file}"):
        return Plan.of(loads(read_whole(None, MOST_PLAN_BYTES, "the plan"))) if file == "-" else Plan.load(file)


def read_costs(file: Path | None) -> Costs | None:
    """Read a costs file, if one is named."""
    from quintsched.simulation.costs import Costs

    return None if file is None else Costs.load(file)


def read_trace(directory: Path, plan: Plan) -> Trace:
    """Read the trace that a run of a plan left in a directory."""
    from quintsched.trace.measured_trace import Trace

    return Trace.load(directory, plan)


def write_costs(costs: Costs, file: Path) -> None:
    """Write a costs file with the costs that were set; raises `UsageError` on failure."""
    from quintsched.files.atomic import write_whole

    text = json.dumps(costs.model_dump(mode="json", exclude_unset=True, exclude_none=True), indent=1)
    write_whole(file, text + "\n", "the costs")


def refuse_input(output: Path | None, *inputs: str | Path | None) -> None:
    """Raise `UsageError` if `output` is one of the files that a command reads, links resolved.

    An input may be "-", None, a directory (its files then count) or "my_file.py:name".
    """
    from quintsched.files.atomic import same_file
    from quintsched.import_user_code import file_of

    for read in filter(None, inputs):
        place = Path("/dev/stdin") if read == "-" else Path(file_of(str(read)))
        if output is not None and same_file(output, place):
            raise UsageError(f"{output}: the command reads this file ({read}); write to another one")


def check_outputs(files: Mapping[str, Path | None], *inputs: str | Path | None) -> None:
    """Raise `UsageError`, before a search, for files by option that cannot all be written after it."""
    from quintsched.files.atomic import writing

    given = {option: file for option, file in files.items() if file is not None}
    for file in given.values():
        refuse_input(file, *inputs)
        with writing(file, "the result"):
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not file.exists():
                TemporaryFile(dir=file.absolute().parent).close()
    if len({file.resolve() for file in given.values()}) < len(given):
        *most, last = given
        raise UsageError(f"{', '.join(most)} and {last} name one file; give each its own")


def simulate_plan(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Time a plan; raises `UnsoundError` with the counter-example where it is not sound: its times mean nothing."""
    with progress(f"proving {counted(plan.num_instructions, 'instruction')}") as found:
        plan.check().raise_if_unsound()
        found.now(f"timing {counted(plan.num_instructions, 'instruction')}")
        return plan.simulate(costs)


def timed(
    plan: Plan, costs: Costs | None, trace: Path | None, steps: str | None
) -> tuple[Simulation, tuple[MeasuredStep, ...]]:
    """Return the plan's times and those of measured steps; without costs, the trace's are taken."""
    if trace is None:
        if steps is not None:
            raise UsageError("--steps chooses steps of a trace; add --trace DIR")
        return simulate_plan(plan, costs), ()
    traced = read_trace(trace, plan)
    simulation = simulate_plan(plan, traced.costs() if costs is None else costs)
    unit = simulation.unit
    return simulation, (traced.step(unit=unit),) if steps is None else traced.select(steps, unit=unit)


def read_schedule(name: str) -> Schedule:
    """Find a schedule by name or in a user's file; prints of that file go to standard error."""
    from quintsched.import_user_code import load_schedule

    with redirect_stdout(sys.stderr):
        return load_schedule(name)


def terminal_width() -> int | None:
    """Return the columns of the terminal, or None if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
