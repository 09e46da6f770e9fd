"""Settings that come from people: frozen, strict, and every fault said in one line with its place.

A settings class documents each field by the string below it. `read_settings` is how a mapping from a file or a
command line becomes one:

    {"optimizr": {…}, "epochs": "two"}  ─▶  UsageError   train.optimizr: unknown key; did you mean 'optimizer'?
                                                         train.epochs: input should be a valid integer, not 'two'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from quintsched.errors import UsageError, printable, suggest
from quintsched.files.strictjson import shorten


class Settings(BaseModel):
    """Base of all settings: frozen, no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


MOST_FAULTS, MOST_LETTERS = 10, 400
"""How many faults a message has, and how many letters each."""

AnySettings = TypeVar("AnySettings", bound=Settings)


def read_settings(kind: type[AnySettings], values: Mapping[str, Any], source: str, prefix: str = "") -> AnySettings:
    """Return `values` as a checked `kind`.

    `source` names where the values came from, `prefix` is the path in front of each key ("model.options").
    Raises UsageError that lists every fault.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults = [_fault(kind, one, prefix) for one in details[:MOST_FAULTS]]
        faults += [f"and {len(details) - MOST_FAULTS} more"] if len(details) > MOST_FAULTS else []
        raise UsageError("\n  ".join([f"{source}:", *faults])) from None


def _fault(kind: type[Settings], details: ErrorDetails, prefix: str) -> str:
    """Return one fault as "path: what is wrong"."""
    place = details["loc"]
    path = ".".join(shorten(str(key)) for key in ([prefix] if prefix else []) + list(place))
    words = f"{path}: {_reason(kind, details)}"
    return printable(words if len(words) <= MOST_LETTERS else f"{words[:MOST_LETTERS]}…")


def _reason(kind: type[Settings], details: ErrorDetails) -> str:
    """Return what is wrong in words, without the place."""
    value, message = details["input"], details["msg"]
    match details["type"]:
        case "extra_forbidden":
            *section, key = details["loc"]
            return "unknown key" + _nearest_key(_section_at(kind, section), str(key))
        case "missing":
            return "is required"
        case "model_type":
            return f"is a section of settings (key: value), not {_short(value)}"
        case "literal_error" if isinstance(value, str):
            return f"there is no {_short(value)}" + suggest(value, re.findall(r"'([^']*)'", details["ctx"]["expected"]))
        case "value_error":
            return message.removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}, not {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _section_at(kind: type[Settings], path: Sequence[int | str]) -> type[Settings]:
    """Return the settings class of the section at `path` below `kind`."""
    for key in path:
        annotation = kind.model_fields[str(key)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, Settings)):
            break
        kind = annotation
    return kind


def _nearest_key(section: type[Settings], key: str) -> str:
    """Suggest the key that was meant: one of the section, or one of the same name a level below."""
    below = [
        f"{name}.{key}"
        for name, field in section.model_fields.items()
        if key in getattr(field.annotation, "model_fields", {})
    ]
    return suggest(below[0], below) if below else suggest(key, section.model_fields)
