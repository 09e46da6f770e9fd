"""Typer application: turns errors into exit codes, and holds the options of `quintsched` itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from quintsched.errors import QuintschedError, UsageError
from quintsched.files.terminal import has_colours, shown, write_error

INTERRUPTED = 130
"""128 + SIGINT, the exit code of a program stopped with Ctrl-C."""

_Misused: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base class of click's errors for an invalid command line."""


WIDEST = 120
"""Columns beyond which lines are hard to read."""

_Formatter: Any = typer.Context.formatter_class


class HelpFormatter(_Formatter):  # type: ignore[misc]
    """The library's formatter of help texts, with bold headings and coloured first columns where these show."""

    def write_heading(self, heading: str) -> None:
        """Write a heading."""
        super().write_heading(_styled(heading, bold=True))

    def write_dl(self, rows: Sequence[tuple[str, str]], *sizes: int, **more: int) -> None:
        """Write a list of names and what they mean."""
        super().write_dl([(_styled(name, fg="cyan"), words) for name, words in rows], *sizes, **more)


def _styled(text: str, **style: Any) -> str:
    return typer.style(text, **style) if has_colours(sys.stdout) else text


class Helping:
    """Help text of commands and groups of commands."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text, in the width of the terminal."""
        formatter = HelpFormatter(max_width=WIDEST)
        self.format_help(ctx, formatter)  # type: ignore[attr-defined]
        return str(formatter.getvalue()).rstrip("\n")

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first sentence, however long: lists wrap it."""
        return str(super().get_short_help_str(limit=sys.maxsize))  # type: ignore[misc]


class Command(Helping, TyperCommand):
    """A command."""


class Commands(Helping, TyperGroup):
    """A group of commands, listed under the headings that they were registered with."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            heading = getattr(command, "rich_help_panel", None)
            heading = heading if isinstance(heading, str) else "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str()))
        widest = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{widest}}", words) for name, words in rows])


def make_app(sections: Mapping[str, Iterable[Callable[..., None] | CommandGroup]]) -> typer.Typer:
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
            if isinstance(command, CommandGroup):
                app.add_typer(command.make(), name=command.name, rich_help_panel=heading)
            else:
                _add(app, command, rich_help_panel=heading)
    return app


def _add(app: typer.Typer, command: Callable[..., None], **how: Any) -> None:
    app.command(command.__name__.removesuffix("_"), cls=Command, **how)(command)


@dataclass(frozen=True)
class CommandGroup:
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


OTHER_NAMES = {
    "run": ("train", "fit", "launch", "start", "torchrun", "pretrain", "finetune", "resume"),
    "compile": ("plan", "build"),
    "render": ("draw", "plot", "visualize", "viz"),
    "simulate": ("sim", "time", "profile", "benchmark"),
    "schedules": ("list", "ls"),
}
"""Words under which commands are looked for."""


class Application(Commands):
    """All commands; they end with a message and the right exit code, never with a traceback of ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of these words; raises `UsageError` that names ours for another tool's word."""
        if ours := next((ours for ours, theirs in OTHER_NAMES.items() if args[0].lower() in theirs), ""):
            raise UsageError(f"there is no command {args[0]!r}; did you mean 'quintsched {ours}'?")
        return super().resolve_command(ctx, args)

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
        error.message = shown(error.message) + _set_advice(error)  # type: ignore[attr-defined]
        raise
    except QuintschedError as error:
        write_error(error)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _set_advice(error: Any) -> str:
    """Return how a setting of the job is written, for an unknown option of a command that takes these; else ""."""
    if not hasattr(error, "possibilities") or all("--set" not in param.opts for param in error.ctx.command.params):
        return ""
    return "; settings of the job go by their keys: --set train.max_steps=100"


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
