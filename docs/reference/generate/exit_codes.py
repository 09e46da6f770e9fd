"""`exit-codes.md`: the exit codes, and the errors that end a process with each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby

from quintsched import errors
from quintsched.cli import app
from quintsched.files import terminal

from .markdown import notice, one_line, table, tidy
from .source import constants

_HEAD = f"""\
# Exit codes

{notice("What commands and runs end with.")}
[README](../../README.md) · [job files](job.md) · [commands](commands.md) · [API](api.md)

torchrun itself ends with 1, whatever its processes end with; `quintsched run` ends with the code of the rank that
failed first. `--restarts` does not repeat a run that ended with {" or ".join(map(str, errors.SURE))}: it would end so
again.
"""


def error_classes() -> Iterator[type[errors.QuintschedError]]:
    """Yield all exception classes of `quintsched.errors`, a base before those derived from it."""
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.QuintschedError) and kind.__module__ == errors.__name__:
            yield kind


def exit_codes_page() -> str:
    """Return `exit-codes.md`; raises `ValueError` with errors that lack a description, and unknown codes."""
    kinds = sorted(error_classes(), key=lambda kind: (kind.exit_code, len(kind.__mro__), kind.__name__))
    missing = [kind.__name__ for kind in kinds if not kind.__doc__]
    missing += [f"exit code {kind.exit_code}" for kind in kinds if kind.exit_code not in errors.EXIT_CODES]
    if missing:
        raise ValueError(f"errors without a description: {', '.join(missing)}")
    signals = [
        (app.INTERRUPTED, constants(app)["INTERRUPTED"]),
        (terminal.PIPE_CLOSED, constants(terminal)["PIPE_CLOSED"]),
    ]
    codes = [*errors.EXIT_CODES.items(), *signals]
    rows = [(f"`{code}`", one_line(meaning)) for code, meaning in codes]
    rows.append(("`128 + n`", "Signal n ended the run before it could stop by itself."))
    lines = [_HEAD, *table(("code", "meaning"), rows), "", "## Errors", ""]
    lines += ["All are in `quintsched.errors` and derive from `QuintschedError`.", ""]
    for code, group in groupby(kinds, key=lambda kind: kind.exit_code):
        lines += [f"### Exit code {code}", ""]
        shown = ((f"`{kind.__name__}`", f"`{kind.__base__.__name__}`", one_line(_first(kind))) for kind in group)
        lines += [*table(("error", "derived from", "meaning"), shown), ""]
    return tidy(lines)


def _first(kind: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
