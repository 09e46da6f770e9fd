"""Help texts: commands under headings, as wide as the terminal, in colour where it has some, and never cut off.

    Plans:                                          bold in a terminal; plain in a pipe, or with NO_COLOR
      schedules   List the schedules, with …
      compile     Compile a plan and …
    Runs:
      run         Run a job, …

Rich would draw the same with boxes, but takes longer to import than the whole help takes to print.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quintsched.files.terminal import has_colours

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
