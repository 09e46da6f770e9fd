"""`api.md`: every public name with its signature, description, arguments, attributes and methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import resolve_name
from typing import Any

from quintsched.schedules import Schedule

from .markdown import anchor, docstring, notice, one_line, table, tidy
from .source import annotations, attributes, constants

MODULES = (
    "quintsched",
    "quintsched.instructions",
    "quintsched.schedules",
    "quintsched.schedules.kit",
    "quintsched.solve",
    "quintsched.testing",
    "quintsched.tokens",
    "quintsched.runtime",
    "quintsched.runtime.data",
    "quintsched.viz",
)
PARTS = {
    "quintsched.runtime.data": (
        "Loaders",
        "DataSpec",
        "PackedStream",
        "PromptAnswers",
        "concatenated",
        "chat",
        "pad_batch",
        "load_tokens",
        "TokenOptions",
        "MixturePart",
        "TokenDataset",
        "TokenSamples",
        "IGNORED_TARGET",
    ),
}
"""Public names of a module whose `__all__` also has what other packages inside take from it."""
WIDTH = 100

_HEAD = f"""\
# Python API

{notice("Every public name: signature, description, arguments, errors.")}
[The overview](../api.md) has one line for each. [README](../../README.md) · [job files](job.md) ·
[commands](commands.md) · [exit codes](exit-codes.md)
"""


class Described:
    """Names that have an entry already, and those that lack a description."""

    def __init__(self) -> None:
        self.entries: dict[int, str] = {}
        self.missing: list[str] = []


def public_names(path: str) -> tuple[str, ...]:
    """Return the public names of a module."""
    return PARTS.get(path) or tuple(import_module(path).__all__)


def api_page() -> str:
    """Return `api.md`; raises `ValueError` with public names and methods that lack a description."""
    lines, seen = [_HEAD], Described()
    lines += [" · ".join(f"[`{name}`](#{anchor(name)})" for name in MODULES), ""]
    for path in MODULES:
        module = import_module(path)
        lines += [f"## {path}", "", *docstring(module.__doc__ or ""), ""]
        for name in public_names(path):
            lines += [f"### {path}.{name}", "", *_entry(f"{path}.{name}", getattr(module, name), seen), ""]
    if seen.missing:
        raise ValueError(f"public names without a description: {', '.join(seen.missing)}")
    return tidy(lines)


def _entry(full: str, thing: Any, seen: Described) -> list[str]:
    if id(thing) in seen.entries:
        return [f"The same as [`{seen.entries[id(thing)]}`](#{anchor(seen.entries[id(thing)])})."]
    seen.entries[id(thing)] = full
    if isinstance(thing, Schedule):
        return _schedule(full, thing, seen)
    if inspect.isclass(thing):
        return _class(full, thing, seen)
    if inspect.isroutine(thing):
        return [*_code(_signature(full.rpartition(".")[2], thing)), *_words(full, thing.__doc__, seen)]
    name = full.rpartition(".")[2]
    is_kinds = isinstance(thing, tuple) and all(map(inspect.isclass, thing))
    value = f"({', '.join(kind.__name__ for kind in thing)})" if is_kinds else _annotation(thing)
    return [*_code(f"{name} = {value}"), *_words(full, _constant(full), seen)]


def _words(full: str, text: str | None, seen: Described) -> list[str]:
    if not (text or "").strip():
        seen.missing.append(full)
    return docstring(text or "")


def _constant(full: str) -> str | None:
    """Return the description below the assignment of a constant, in whichever module of the package assigns it."""
    path, _, name = full.rpartition(".")
    imported = re.findall(r"^from ((?:quintsched)?\.\S+) import", inspect.getsource(import_module(path)), re.M)
    homes = [path, *(resolve_name(one, path) for one in imported)]
    found = (constants(import_module(home)).get(name) for home in homes)
    return next((words for words in found if words), None)


def _schedule(full: str, schedule: Schedule, seen: Described) -> list[str]:
    names = ", ".join(f"`{name}`" for name in (schedule.name, *schedule.aliases))
    facts = [("on the command line", names), ("bubble", schedule.bubble), ("activations on rank r", schedule.memory)]
    about = f"{schedule.summary[:1].upper()}{schedule.summary[1:]}."
    return [*_words(full, about, seen), "", *table(("", ""), [(name, one_line(value)) for name, value in facts])]


def _class(full: str, kind: type, seen: Described) -> list[str]:
    name = full.rpartition(".")[2]
    lines = list[str]()
    if not issubclass(kind, Exception):
        lines += _code(_signature(name, kind))
    own = kind.__dict__.get("__doc__")
    is_generated = own is not None and own.startswith(f"{kind.__name__}(")
    lines += _words(full, None if is_generated else own, seen)
    if issubclass(kind, Exception):
        return [*lines, "", f"Exit code {kind.exit_code}; a `{kind.__base__.__name__}`."]  # type: ignore[attr-defined, union-attr]
    rows = [(f"`{key}`", one_line(words)) for key, words in _fields(kind).items()]
    lines += ["", *table(("attribute", ""), rows), ""] if rows else []
    for method, found in _members(kind):
        lines += ["", *_member(f"{full}.{method}", method, found, seen)]
    return lines


def _fields(kind: type) -> dict[str, str]:
    """Return the described attributes of a class and of its bases in this package."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("quintsched"):
            found |= attributes(one)
    fields = getattr(kind, "model_fields", {})
    found |= {name: field.description for name, field in fields.items() if field.description and name not in found}
    return {name: words for name, words in found.items() if not name.startswith("_")}


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class and of its bases in this package."""
    seen = set[str]()
    for one in kind.__mro__:
        for name, found in vars(one).items() if one.__module__.startswith("quintsched") else ():
            is_callable = isinstance(found, classmethod | staticmethod | property) or (
                inspect.isfunction(found) and found.__name__ != "<lambda>"
            )
            is_callable = is_callable or type(found).__name__ == "cached_property"
            if is_callable and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, found


def _member(full: str, name: str, found: Any, seen: Described) -> list[str]:
    title = f"#### {'.'.join(full.split('.')[-2:])}"
    if isinstance(found, property) or type(found).__name__ == "cached_property":
        getter = found.fget if isinstance(found, property) else found.func
        kind = inspect.signature(getter).return_annotation
        code = [] if kind is inspect.Signature.empty else _code(f"{name}: {_annotation(kind)}")
        return [title, "", *code, *_words(full, found.__doc__, seen)]
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    above = f"@{type(found).__name__}\n" if isinstance(found, classmethod | staticmethod) else ""
    signature = _signature(name, function, drops_first=not isinstance(found, staticmethod))
    return [title, "", *_code(f"{above}{signature}"), *_words(full, function.__doc__, seen)]


def _code(text: str) -> list[str]:
    return ["```python", *text.splitlines(), "```", ""]


def _signature(name: str, thing: Any, *, drops_first: bool = False) -> str:
    """Return a signature, on one line if it is short, else one argument per line."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"{name}(…)"
    parameters = list(signature.parameters.values())[drops_first:]
    parts, was_keyword = list[str](), False
    written = annotations(thing) if hasattr(thing, "model_fields") else {}
    for one in parameters:
        was_keyword = was_keyword or one.kind is one.VAR_POSITIONAL
        if one.kind is one.KEYWORD_ONLY and not was_keyword:
            parts.append("*")
            was_keyword = True
        parts.append(_parameter(one.replace(annotation=written.get(one.name, one.annotation))))
    returns = "" if signature.return_annotation is signature.empty or inspect.isclass(thing) else _arrow(signature)
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _arrow(signature: inspect.Signature) -> str:
    return f" -> {_annotation(signature.return_annotation)}"


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {_annotation(one.annotation)}"
    equals = " = " if kind else "="
    return f"{stars}{one.name}{kind}" + ("" if one.default is one.empty else f"{equals}{_value(one.default)}")


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text) if not isinstance(annotation, str) else text


def _value(default: Any) -> str:
    if inspect.isroutine(default) or inspect.isclass(default):
        return "…" if default.__name__ == "<lambda>" else default.__qualname__
    if hasattr(type(default), "model_fields"):
        return f"{type(default).__name__}()"
    text = repr(default)
    return "…" if " at 0x" in text or len(text) > 60 or "<" in text else text
