"""Reading a job file: YAML and `--set` overrides to a checked JobConfig.

job.yaml ─▶ mapping ─▶ overrides put in ─▶ JobConfig
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictyaml import MOST_BYTES, parse_yaml

from .config import JobConfig, spell_out_auto
from .settings import read_settings


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the job of the YAML file at `path`, with overrides such as "train.epochs=4" put in.

    Raises UsageError that names the file and lists every fault.
    """
    values = _without_empty_sections(_read_mapping(Path(path)))
    for override in (None, *overrides):
        if override is not None:
            _put(values, override)
        if "parallel" in values:
            values["parallel"] = spell_out_auto(values["parallel"])
    return read_settings(JobConfig, values, _source(path, overrides))


def _source(path: str | Path, overrides: Sequence[str]) -> str:
    return " ".join([str(path), *(f"--set {override}" for override in overrides)])


def _read_mapping(path: Path) -> dict[Any, Any]:
    """Return the file's top-level mapping; an empty file is an empty one."""
    try:
        content = read_whole(path, MOST_BYTES, "the job file")
    except InputError as error:
        raise UsageError(str(error)) from None
    values = parse_yaml(content, str(path), UsageError)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}: a job file holds sections (model: …, train: …), not a {type(values).__name__}")
    return values


def _without_empty_sections(values: dict[Any, Any]) -> dict[Any, Any]:
    """Drop sections without a setting ("train:" with every line commented out)."""
    return {key: value for key, value in values.items() if value is not None}


def _put(values: dict[Any, Any], override: str) -> None:
    """Set what "section.key=value" says in `values`, making the sections it lacks."""
    path, equals, text = override.partition("=")
    *sections, key = path.strip().split(".")
    if not equals or not all([*sections, key]):
        raise UsageError(f"--set {override}: write it as section.key=value")
    for depth, section in enumerate(sections):
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UsageError(f"--set {override}: {'.'.join(sections[: depth + 1])} is not a section")
    values[key] = parse_yaml(text, f"--set {override}", UsageError)
