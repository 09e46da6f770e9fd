"""`quintsched export` and `quintsched import`: conversion of plans to and from formats of other tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.shared_options import AsJson, PlanFile, emit, note, read_plan, refuse_input, say
from quintsched.errors import InputError, UnsoundError, UsageError, suggest

if TYPE_CHECKING:
    from quintsched.plan import Plan


@dataclass(frozen=True)
class Format:
    """Export format: its text, the properties that it leaves out, and the options of `export` that it takes."""

    text: Callable[..., str]
    left_out: Callable[[Plan], Iterable[str]]
    options: tuple[str, ...] = ()


def _torch_csv(plan: Plan, **options: Any) -> str:
    from quintsched import torch_csv

    return torch_csv.dumps(plan, **options)


def _torch_csv_leaves_out(plan: Plan) -> Iterable[str]:
    from quintsched.torch_csv import left_out

    return left_out(plan)


def _promela(plan: Plan, **options: Any) -> str:
    from quintsched.formats.promela import to_promela

    return to_promela(plan, **options)


def _graphml(plan: Plan) -> str:
    from quintsched.formats.graph_text import to_graphml

    return to_graphml(plan)


def _dot(plan: Plan) -> str:
    from quintsched.formats.graph_text import to_dot

    return to_dot(plan)


FORMATS = {
    "torch-csv": Format(_torch_csv, _torch_csv_leaves_out, ("compute_only", "waits")),
    "promela": Format(_promela, lambda _: (), ("profile", "buffer")),
    "graphml": Format(_graphml, lambda _: ()),
    "dot": Format(_dot, lambda _: ()),
}
"""Export formats, by name."""


def export(
    plan: PlanFile,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of: {', '.join(FORMATS)}.")],
    compute_only: Annotated[
        bool, typer.Option("--compute-only", help="Only the order of computation (torch-csv).")
    ] = False,
    waits: Annotated[
        bool, typer.Option("--waits", help="Each send and reduction is waited for, as torch 2.15 wants it (torch-csv).")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="The transport to model (promela); default: blocking."),
    ] = None,
    buffer: Annotated[
        int | None,
        typer.Option("--buffer", metavar="K", help="Messages that a channel holds (promela); default: 0, rendezvous."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file; default: standard output.")
    ] = None,
) -> None:
    """Write a plan in the format of another tool."""
    from quintsched.files.atomic import write_whole

    if to not in FORMATS:
        raise UsageError(f"unknown format {to!r}{suggest(to, FORMATS)}")
    if compute_only and waits:
        raise UsageError("--waits is about messages and reductions, which --compute-only leaves out; give one of both")
    asked = {"compute_only": compute_only or None, "waits": waits or None, "profile": profile, "buffer": buffer}
    given = {name: value for name, value in asked.items() if value is not None}
    for name in given:
        if name not in FORMATS[to].options:
            others = ", ".join(other for other, form in FORMATS.items() if name in form.options)
            raise UsageError(f"--{name.replace('_', '-')}: {to} has no such form; it is for {others}")
    refuse_input(output, plan)
    found = read_plan(plan)
    text = FORMATS[to].text(found, **given)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_whole(output, text, "the file")
        say(f"{output}: {found.title}")
    for line in FORMATS[to].left_out(found):
        note(f"{output or to}: the file does not say {line}")


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A schedule in PyTorch's CSV format, or -.")],
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="AXES", help="The device mesh; default: a pipeline rank per line.")
    ] = None,
    zero: Annotated[
        int,
        typer.Option(
            "--zero",
            metavar="0-3",
            help="What replicas share out; with 3, UNSHARD and RESHARD gather and free weights.",
        ),
    ] = 0,
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="The transport under which the plan must not deadlock.")
    ] = "channel",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="The plan file; default: standard output.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read PyTorch's schedule CSV, prove it, write the plan."""
    from quintsched import torch_csv
    from quintsched.cli.check import report

    refuse_input(output, file)
    text, name = _read(file)
    try:
        imported = torch_csv.loads(text, mesh=mesh, zero=zero, profile=profile, name=name)
    except InputError as error:
        if as_json:
            point = "unsound" if isinstance(error, UnsoundError) else "well-formed"
            emit({"sound": False, "findings": [{"point": point, "message": str(error)}]})
        raise type(error)(f"{file}: {error}") from error
    plan, verdict = imported.plan, imported.verdict
    for line in imported.notes:
        note(f"{file}: {line}")
    if output is None:
        note(f"{plan.title}\n{verdict.explain()}")
        typer.echo(plan.to_json(), nl=False)
        return
    plan.save(output)
    if as_json:
        emit({"plan": str(output), **report(verdict, profile), "notes": list(imported.notes)})
    else:
        say(f"{output}: {plan.title}\n{verdict.explain()}")


def _read(file: str) -> tuple[str, str]:
    """Return a file's text and the name of its schedule."""
    from quintsched.files.atomic import read_whole
    from quintsched.torch_csv import MAX_CHARACTERS

    data = read_whole(None if file == "-" else Path(file), MAX_CHARACTERS, "the schedule")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text: byte {error.start} cannot be read") from error
    stem = Path(file).stem
    return text, stem if file != "-" and stem.isprintable() and len(stem) <= 200 else "torch-csv"
