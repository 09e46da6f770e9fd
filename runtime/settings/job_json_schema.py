"""A job file as a document: every key with its meaning and value as YAML, and the JSON Schema of job files.

job_yaml(job)                             job_schema()
train:                                    {"properties": {"train": {"properties": {"clip": {"type": …
  # The largest global norm of …
  clip: 1.0
  # epochs: 1   # default                 a default that means something else where it is written
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

import yaml

from .engine_settings import SettingRule, Settings
from .job_file import JobConfig

LINE_WIDTH = 100
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
_HEAD = """\
All settings of a job, defaults included. A line such as "# key: value  # default" is a default that means something
else where it is written: remove the first "#" to set it."""


def job_yaml(job: JobConfig) -> str:
    """Return all settings of a job as a job file: the same job, with each key's meaning above it."""
    return "\n".join([*_comment(_HEAD, ""), "", *_lines(job, ""), ""])


def _lines(settings: Settings, indent: str) -> Iterator[str]:
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        yield from _comment(field.description or "", indent)
        if isinstance(value, Settings):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
            yield from [""] * (not indent)
            continue
        written = yaml.safe_dump([settings.model_dump(mode="json")[name]], default_flow_style=True, width=10**6)
        line = f"{name}: {written.strip()[1:-1]}"
        is_unset = SettingRule.GIVEN in field.metadata and name not in settings.model_fields_set
        yield f"{indent}# {line}  # default" if is_unset else f"{indent}{line}"
        yield from [""] * (not indent)


def _comment(words: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in wrap(" ".join(words.split()), LINE_WIDTH - len(indent) - 2)]


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
_SHORT_FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("JobConfig", "parallel"): {"const": "auto"},
    ("ParallelConfig", "auto"): {"type": "boolean"},
    ("GroupConfig", "params"): _TEXT,
}
"""Other forms of a key, which are spelled out as a job is read."""


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of job files."""
    found = JobConfig.model_json_schema()
    kinds = found.pop("$defs")
    for name, kind in {**kinds, "JobConfig": found}.items():
        kind.pop("title", None)
        kind["description"] = " ".join(kind["description"].split())
        for key, field in kind["properties"].items():
            kind["properties"][key] = _plain(field, _SHORT_FORMS.get((name, key)))
    axes = kinds["AutoConfig"]["properties"]["axes"]
    axes["additionalProperties"] = _either(axes["additionalProperties"], _COUNT)
    sinks = kinds["LogConfig"]["properties"]["sinks"]
    sinks["items"] = _either(sinks["items"], _TEXT)
    return {"$schema": SCHEMA, "title": "Job file of quintsched", **found, "$defs": kinds}


def _plain(field: dict[str, Any], short: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of one key: its words on one line, its short form allowed, no default of a whole section."""
    about = {"description": " ".join(field.pop("description", "").split())}
    field.pop("title", None)
    default = {"default": field.pop("default")} if "default" in field else {}
    default = {} if "$ref" in field else default
    return {**about, **(_either(field, short) if short else field), **default}


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*one.get("anyOf", [one]), other]}
