"""`commands.md`: every command with its arguments and options, as `--help` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quintsched.cli import _command
from quintsched.runtime.launch.run_arguments import RunRequest

from .markdown import anchor, docstring, notice, one_line, table, tidy

_HEAD = f"""\
# Commands

{notice("Every command with its options.")}
[README](../../README.md) · [job files](job.md) · [API](api.md) · [exit codes](exit-codes.md)

`quintsched COMMAND --help` prints the same. Commands that report take `--json`.
"""


def walk(command: Any, name: str = "quintsched") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the object of a command, and of all below it."""
    yield name, command
    for below, found in getattr(command, "commands", {}).items():
        if not found.hidden:
            yield from walk(found, f"{name} {below}")


def parameters(command: Any) -> list[tuple[str, str, str, str]]:
    """Return the spelling, value, default and meaning of each argument and option of a command."""
    rows = []
    for one in command.params:
        is_argument = type(one).__name__.endswith("Argument")
        if getattr(one, "hidden", False) or one.name == "help":
            continue
        metavar = one.metavar or getattr(one, "human_readable_name", "")
        names = metavar if is_argument else ", ".join(f"{name}" for name in (*one.opts, *one.secondary_opts))
        value = "" if is_argument or getattr(one, "is_flag", False) else one.metavar or one.name.upper()
        rows.append((names, value, _default(one), getattr(one, "help", "") or ""))
    return rows


def _default(parameter: Any) -> str:
    """Return a default as it is written on the command line; "" for none."""
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or value == () or value == [] or callable(value):
        return ""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "on" if value is True else str(getattr(value, "value", value))


def commands_page() -> str:
    """Return `commands.md`; raises `ValueError` with commands and options that lack a description."""
    found = list(walk(_command()))
    lines, missing = [_HEAD], list[str]()
    lines += table(
        ("command", ""),
        [
            (f"[`{name}`](#{anchor(name)})", one_line((command.help or "").split("\n\n")[0]))
            for name, command in found[1:]
        ],
    )
    for name, command in found:
        rows = parameters(command)
        missing += [name] if not (command.help or "").strip() else []
        missing += [f"{name} {spelling}" for spelling, _, _, meaning in rows if not meaning.strip()]
        lines += ["", f"## {name}", "", *docstring((command.help or "").split("\f")[0]), ""]
        lines += _table(rows)
    lines += ["", "## python -m quintsched.runtime", "", *docstring(RunRequest.__doc__ or ""), ""]
    lines += ["One rank, as torchrun starts it: `torchrun --nproc-per-node N -m quintsched.runtime …`", ""]
    lines += _table(_flags())
    if missing:
        raise ValueError(f"commands and options without a description: {', '.join(missing)}")
    return tidy(lines)


def _flags() -> Iterator[tuple[str, str, str, str]]:
    for name, field in RunRequest.model_fields.items():
        spelling = "PLAN" if name == "plan" else f"--{name.replace('_', '-')}"
        default = "required" if field.is_required() else ""
        value = "" if field.annotation is bool or name == "plan" else name.upper()
        yield spelling, value, default, field.description or ""


def _table(rows: Any) -> list[str]:
    shown = [
        (f"`{names}`", f"`{value}`" if value else "", f"`{default}`" if default else "", one_line(meaning))
        for names, value, default, meaning in rows
    ]
    return table(("option", "value", "default", "meaning"), shown) if shown else []
