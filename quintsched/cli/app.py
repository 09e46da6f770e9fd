"""Typer application: turns errors into exit codes, and holds the options of `quintsched` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from quintsched.cli.help_text import Command, Commands
from quintsched.errors import QuintschedError, UsageError
from quintsched.files.terminal import shown, write_error

INTERRUPTED = 130
"""128 + SIGINT, the exit code of a program stopped with Ctrl-C."""

_Misused: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base class of click's errors for an invalid command line."""


def make_app(sections: Mapping[str, Iterable[Callable[..., None] | Group]]) -> typer.Typer:
    """Return an application of these commands and groups, by the heading that each has in the help, in this order.

    `import_` is called import.
    """
    app = typer.Typer(
        cls=Application,
        callback=quintsched,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for heading, commands in sections.items():
        for command in commands:
            if isinstance(command, Group):
                app.add_typer(command.make(), name=command.name, rich_help_panel=heading)
            else:
                _add(app, command, rich_help_panel=heading)
    return app


def _add(app: typer.Typer, command: Callable[..., None], **how: Any) -> None:
    app.command(command.__name__.removesuffix("_"), cls=Command, **how)(command)


@dataclass(frozen=True)
class Group:
    """Commands below a common word: `quintsched checkpoint show`."""

    name: str
    help: str
    commands: Sequence[Callable[..., None]]

    def make(self) -> typer.Typer:
        """Return the application of the commands."""
        app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, help=self.help)
        for command in self.commands:
            _add(app, command)
        return app


class Application(Commands):
    """All commands; they end with a message and the right exit code, never with a traceback of ours."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Read the command line up to the command's name; --install-completion writes its files meanwhile."""
        with _ending_in_words():
            try:
                return super().make_context(*arguments, **settings)
            except OSError as error:
                raise UsageError(
                    f"cannot install the completion: {error.filename}: {error.strerror}; put what --show-completion "
                    "prints where your shell reads it"
                ) from error

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
