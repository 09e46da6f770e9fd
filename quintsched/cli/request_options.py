"""Command-line options for the settings of a request, generated from the request class.

memory_cap: float | None = setting("the most activations …", metavar="X")  ──▶  --memory-cap X   The most activations …

A command that takes a mesh takes its axes as well: `--mesh dp=2,pp=4`, or `--dp 2 --pp 4`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from quintsched.errors import UsageError
from quintsched.request import CompileRequest, RequestOption, entries

AXIS_OPTIONS = {
    "dp": "Data-parallel ranks.",
    "tp": "Tensor-parallel ranks.",
    "pp": "Pipeline ranks.",
    "cp": "Context-parallel ranks: slices of the sequence.",
    "ep": "Expert-parallel ranks.",
}
"""The axes of a mesh as options of their own, and what they count."""
NEEDED = ("schedule", "mesh", "microbatches")
"""The settings without which no plan is compiled, unless a job file has them."""


def option_of(name: str) -> str:
    """Return the option of an entry: "--memory-cap"; a unit suffix of the name is left to the metavar."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def taking_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of all settings, and of the axes of the mesh.

    It gets their values as `settings`: by the entries' names those that were given on the command line, else None.
    """
    names = [*(entry.name for entry in entries()), *AXIS_OPTIONS]

    def run(ctx: typer.Context, **options: Any) -> None:
        values = {name: options.pop(name) for name in names}
        given = {name for name in names if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
        command(settings={name: value if name in given else None for name, value in values.items()}, **options)

    others = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    both = [
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(made for entry in entries() for made in (_parameter(entry), *(_axes() if entry.name == "mesh" else ()))),
        *(other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others),
    ]
    run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(entry: RequestOption) -> inspect.Parameter:
    kind: Any = (
        list[str] if entry.setting.text is list else type(entry.default) if entry.part_of else entry.setting.text
    )
    if entry.setting.text is bool:
        return _flag(entry)
    spellings = [option_of(entry.name), *([f"-{entry.setting.letter}"] if entry.setting.letter else [])]
    words = f"{entry.doc[0].upper()}{entry.doc[1:]}"
    default = None if entry.default is MISSING else entry.default
    if entry.setting.parse and default is not None:
        default = str(default)
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[
            kind if default is not None else kind | None, typer.Option(*spellings, metavar=entry.metavar, help=words)
        ],
    )


def _flag(entry: RequestOption) -> inspect.Parameter:
    spelling = f"{option_of(entry.name)}/--no-{entry.name.replace('_', '-')}"
    option = typer.Option(spelling, help=f"{entry.doc[0].upper()}{entry.doc[1:]}")
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(entry.name, kind, default=entry.default, annotation=Annotated[bool, option])


def _axes() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[int | None, typer.Option(f"--{name}", metavar="N", help=words)],
        )
        for name, words in AXIS_OPTIONS.items()
    ]


def mesh_given(mesh: str | None, sizes: Mapping[str, int | None]) -> str | None:
    """Return the mesh that --mesh gives, or the sizes of its axes, which are laid out as predictions do it.

    None where nothing is given; raises `UsageError` where both are.
    """
    from quintsched.ir.mesh import LAID_OUT

    named = [axis for axis in LAID_OUT if sizes.get(axis) is not None]
    if mesh is not None and named:
        raise UsageError(f"--mesh {mesh} and --{named[0]} {sizes[named[0]]}: both say the mesh; give one of them")
    return mesh if mesh is not None or not named else ",".join(f"{axis}={sizes[axis]}" for axis in named)


def read_request(settings: dict[str, Any], **more: Any) -> CompileRequest:
    """Return the request that options give; what a user's own file prints meanwhile goes to standard error.

    Raises `UsageError`, also for a setting that is missing.
    """
    settings = {**settings, "mesh": mesh_given(settings["mesh"], settings)}
    for name in NEEDED:
        if settings[name] is None:
            axes = ", or its axes: --dp, --pp, --tp, --cp, --ep" if name == "mesh" else ""
            needed = "a plan needs --schedule, --mesh and --microbatches, or a job file"
            raise UsageError(f"{option_of(name)} is missing{axes}; {needed}")
    given = {
        entry.name: _parsed(entry, settings[entry.name]) for entry in entries() if settings[entry.name] is not None
    }
    with redirect_stdout(sys.stderr):
        return CompileRequest.of_data(given, **more)


def _parsed(entry: RequestOption, value: Any) -> Any:
    return entry.setting.parse(option_of(entry.name), value) if entry.setting.parse else value
