"""Command-line options for the settings of a request, generated from the request class.

memory_cap: float | None = setting("the most activations …", metavar="X")  ──▶  --memory-cap X   The most activations …
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from quintsched.request import CompileRequest, Entry, entries


def option_of(name: str) -> str:
    """Return the option of an entry: "--memory-cap"; a unit suffix of the name is left to the metavar."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def taking_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of all settings; it gets their values, by entry name, as `settings`."""
    names = [entry.name for entry in entries()]

    def run(**options: Any) -> None:
        command(settings={name: options.pop(name) for name in names}, **options)

    others = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    both = [*map(_parameter, entries()), *(other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others)]
    run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(entry: Entry) -> inspect.Parameter:
    kind: Any = list[str] if entry.setting.text is list else float if entry.part_of else entry.setting.text
    if entry.setting.text is bool:
        return _flag(entry)
    spellings = [option_of(entry.name), *([f"-{entry.setting.letter}"] if entry.setting.letter else [])]
    words = f"{entry.doc[0].upper()}{entry.doc[1:]}"
    default = inspect.Parameter.empty if entry.default is MISSING else entry.default
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


def _flag(entry: Entry) -> inspect.Parameter:
    spelling = f"{option_of(entry.name)}/--no-{entry.name.replace('_', '-')}"
    option = typer.Option(spelling, help=f"{entry.doc[0].upper()}{entry.doc[1:]}")
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(entry.name, kind, default=entry.default, annotation=Annotated[bool, option])


def read_request(settings: dict[str, Any], **more: Any) -> CompileRequest:
    """Return the request from the options; prints of a user's own file go to standard error."""
    given = {
        entry.name: _parsed(entry, settings[entry.name]) for entry in entries() if settings[entry.name] is not None
    }
    with redirect_stdout(sys.stderr):
        return CompileRequest.of_data(given, **more)


def _parsed(entry: Entry, value: Any) -> Any:
    return entry.setting.parse(option_of(entry.name), value) if entry.setting.parse else value
