"""Typer application: turns errors into exit codes, and holds the options of `quintsched` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quintsched.errors import QuintschedError
from quintsched.files.terminal import shown, write_error

INTERRUPTED = 130
"""128 + SIGINT, the exit code of a program stopped with Ctrl-C."""

_Misused: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base class of click's errors for an invalid command line."""


def make_app(commands: Iterable[Callable[..., None]], groups: Iterable[Group] = ()) -> typer.Typer:
    """Return an application of these commands, in this order, and of groups; `import_` is called import."""
    app = typer.Typer(
        cls=Commands,
        callback=quintsched,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in commands:
        app.command(command.__name__.removesuffix("_"))(command)
    for group in groups:
        made = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=group.help)
        for command in group.commands:
            made.command(command.__name__.removesuffix("_"))(command)
        app.add_typer(made, name=group.name)
    return app


@dataclass(frozen=True)
class Group:
    """Commands below a common word: `quintsched checkpoint show`."""

    name: str
    help: str
    commands: Sequence[Callable[..., None]]


class Commands(TyperGroup):
    """Group of commands that ends with a message and the right exit code, never with a traceback."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the command line."""
        with _ending_in_words():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _ending_in_words():
            return super().invoke(ctx)


@contextmanager
def _ending_in_words() -> Iterator[None]:
    try:
        yield
    except _Misused as error:
        error.message = shown(error.message)  # type: ignore[attr-defined]
        raise
    except QuintschedError as error:
        write_error(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("quintsched"))
        raise typer.Exit


def quintsched(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile pipeline-parallel training into a plan; prove, time, draw and run it.

    Exit codes: 0 good, 1 the plan or input is not sound, 2 wrong usage, 3 the run does not fit the plan,
    4 a run stalled or a peer died.
    """
