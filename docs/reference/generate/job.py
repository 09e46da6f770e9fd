"""`job.md` and `job.schema.json`: every key of a job file.

`since.json` keeps the version in which each key first was: a key that is not there yet is of the present version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from quintsched.runtime.settings.job_json_schema import job_schema

from .markdown import notice, one_line, table, tidy

SINCE = Path(__file__).parents[1] / "since.json"
Schema = dict[str, Any]

_HEAD = f"""\
# Job files: every key

{notice("The keys of a job file, section by section.")}
[Jobs](../jobs.md) shows their use. [README](../../README.md) · [commands](commands.md) · [API](api.md) ·
[exit codes](exit-codes.md)

- `quintsched run --print-config job.yaml` prints a job with all these keys, their values and meaning.
- `--set train.epochs=4` overrides a key. An unknown key is an error that names the nearest one.
- [job.schema.json](job.schema.json), or `quintsched run --print-schema`, is the JSON Schema for editors. Put
  `# yaml-language-server: $schema=job.schema.json` into the first line of a job file.
- Keys with the default "–" are required.
"""


class Key(NamedTuple):
    """One key of a job file: its full name, type in words, default and meaning."""

    name: str
    kind: str
    default: str
    meaning: str


class Section(NamedTuple):
    """One section: its full name, meaning, and keys; "" is the top of the file."""

    name: str
    meaning: str
    keys: list[Key]


def sections() -> list[Section]:
    """Return all sections of a job file."""
    schema = job_schema()
    kinds: dict[str, Schema] = schema.pop("$defs")
    return list(_sections("", schema, kinds))


def _sections(name: str, kind: Schema, kinds: dict[str, Schema]) -> Iterator[Section]:
    keys, below = list[Key](), list[tuple[str, Schema]]()
    for key, field in kind["properties"].items():
        full = f"{name}.{key}" if name else key
        found = _section_in(field)
        if found:
            below.append((f"{full}[]" if "items" in field else full, kinds[found]))
        if not found or "$ref" not in field:
            default = json.dumps(field["default"], ensure_ascii=False) if "default" in field else "–"
            default = default if key not in kind.get("required", ()) else "–"
            empty = "{}" if field.get("type") == "object" and "default" not in field else default
            keys.append(Key(full, words_of(field), default if empty == default else empty, field["description"]))
    yield Section(name, kind["description"], keys)
    for full, found_kind in below:
        yield from _sections(full, found_kind, kinds)


def _section_in(field: Schema) -> str | None:
    """Return the name of the kind of section that a key holds, one or a list of them."""
    places = [field, field.get("items", {}), *field.get("anyOf", ()), *field.get("items", {}).get("anyOf", ())]
    return next((place["$ref"].rpartition("/")[2] for place in places if "$ref" in place), None)


def words_of(field: Schema) -> str:
    """Return a type in words."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(words_of, field["anyOf"])))
    if "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "$ref" in field:
        return "section"
    match field.get("type"):
        case "integer" | "number" as kind:
            return f"{'whole number' if kind == 'integer' else 'number'}{_bounds(field)}"
        case "array":
            items = field.get("items") or field.get("prefixItems", [{}])[0]
            words = [words_of(items)] * field["maxItems"] if "maxItems" in field else [words_of(items), "…"]
            return f"[{', '.join(words)}]"
        case "object":
            values = field.get("additionalProperties")
            return f"{{name: {words_of(values) if isinstance(values, dict) else 'value'}, …}}"
    return {"string": "text", "boolean": "true or false", "null": "null"}.get(field.get("type", ""), "any")


def _bounds(field: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field and abs(field[name]) < 2**60]
    return f" {', '.join(found)}" if found else ""


def since() -> dict[str, str]:
    """Return the version in which each key first was."""
    known: dict[str, str] = json.loads(SINCE.read_text(encoding="utf-8")) if SINCE.exists() else {}
    names = sorted(key.name for section in sections() for key in section.keys)
    return {name: known.get(name, version("quintsched")) for name in names}


def since_text() -> str:
    """Return the content of `since.json`."""
    return json.dumps(since(), indent=1) + "\n"


def schema_text() -> str:
    """Return the content of `job.schema.json`."""
    return json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n"


def job_page() -> str:
    """Return `job.md`; raises `ValueError` with keys that lack a description."""
    lines, versions = [_HEAD], since()
    found = sections()
    lines += [
        " · ".join(f"[`{one.name}`](#{one.name.replace('.', '').replace('[]', '')})" for one in found if one.name)
    ]
    missing = [key.name for section in found for key in section.keys if not key.meaning.strip()]
    if missing:
        raise ValueError(f"keys of a job without a description: {', '.join(missing)}")
    for section in found:
        lines += ["", f"## {section.name}" if section.name else "## The top of the file", ""]
        lines += [one_line(section.meaning), ""] if section.name else []
        rows = (
            (f"`{key.name}`", key.kind, f"`{key.default}`", one_line(key.meaning), versions[key.name])
            for key in section.keys
        )
        lines += table(("key", "type", "default", "meaning", "since"), rows)
    return tidy(lines)
