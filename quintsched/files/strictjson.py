"""Strict JSON parser: refuses duplicate keys, NaN and infinity; every error names the place."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from quintsched.errors import InputError, printable, suggest

if TYPE_CHECKING:
    from pydantic import ValidationError


MOST_CHARACTERS = 60
"""Maximum number of characters of a file's text in a message."""


def shorten(text: str) -> str:
    """Return text from a file, cut to a length fit for a message."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        others = printable(shorten(", ".join(islice(made, MOST_CHARACTERS))))
        raise InputError(f"duplicate key {shorten(twice)!r} in an object with the keys {others}")
    return made


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[-+.\w]+')


class _BadNumber(Exception):
    """Internal error of the parser: a token and why it is not a number."""


def _no_constant(name: str) -> NoReturn:
    raise _BadNumber(name, "is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadNumber(text, "is too large for a number")
    return value


def _place(text: str, is_meant: Callable[[str], bool]) -> str:
    """Return the position of the first token outside of strings for which `is_meant` holds, as text."""
    for found in _TOKEN.finditer(text):
        if is_meant(found[0]):
            line, before = text.count("\n", 0, found.start()) + 1, text.rfind("\n", 0, found.start())
            return f" at line {line}, column {found.start() - before}"
    return ""


def parse_strict(text: str | bytes) -> object:
    """Return the parsed JSON; raises `InputError` with the fault and, for bad syntax, its place."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        cut = " (the file ends too early: is it truncated?)" if error.pos >= len(error.doc.rstrip()) else ""
        raise InputError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}{cut}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} cannot be read") from error
    except RecursionError as error:
        raise InputError("nested too deeply") from error
    except _BadNumber as error:
        token, why = error.args
        raise InputError(f"{shorten(token)} {why}{_place(str(text), token.__eq__)}") from None
    except ValueError as error:  # an int of more digits than Python parses
        most = sys.get_int_max_str_digits()
        where = _place(str(text), lambda token: len(token) > most and token.lstrip("-").isdigit())
        raise InputError(f"not JSON: a number of more than {most} digits{where}") from error


def pointer(*steps: object) -> str:
    """Return a JSON pointer (RFC 6901) to a place."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


NUMBER, LIST, OBJECT = "(number)", "(list)", "(object)"
"""Tags of the forms of a pydantic union: pydantic adds them to a fault's place, where the file has no such key."""

_WORDS = {
    "extra_forbidden": "unknown key",
    "less_than_equal": "Input should be at most {le:g}",
    "greater_than_equal": "Input should be at least {ge:g}",
    "value_error": "{error}",
    "union_tag_invalid": "Input should not be {tag}; give one of: {expected_tags}",
}
"""Messages that replace pydantic's own, by type of fault."""


def describe_faults(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Return pydantic's first fault as `/where: what`, with the number of further faults.

    `known`: keys of a record that users write, which are suggested for an unknown one.
    """
    faults = error.errors(include_url=False)
    first = faults[0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    words = _WORDS[first["type"]].format(**first.get("ctx", {})) if first["type"] in _WORDS else first["msg"]
    if known and first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        words += suggest(shorten(str(first["loc"][0])), known, closeness=0.65)
    steps = (step for step in first["loc"] if step not in (NUMBER, LIST, OBJECT))
    where = pointer(*(shorten(step) if isinstance(step, str) else step for step in steps))
    return printable(f"{where or '/'}: {words}{more}")
