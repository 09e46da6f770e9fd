"""Settings of a run, by name: those of its job file, its plan, its code and its transport.

    train.seed: 0    train.optimizer.lr: 0.001    plan.mesh: "dp=2,pp=2"    code.torch: "2.13.0"    code.mine.py: "9f…"

Settings that may differ between machines (`OF_A_MACHINE`), such as paths, are left out. The contents of these files
are compared instead: the plan itself, the samples of a data set, a hash of the user's code files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import quintsched
from quintsched.errors import QuintschedError
from quintsched.import_user_code import file_of, is_user_object, require_file
from quintsched.plan import Plan

from ..comm import Transport
from ..settings.engine_settings import SettingRule
from ..settings.job_file import JobConfig, marked
from .refuse_unequal_ranks import Plain, Record, Section, require_same

OF_A_MACHINE, CODE_SETTINGS = (tuple(marked(mark)) for mark in (SettingRule.OF_A_MACHINE, SettingRule.CODE))
"""Settings of a job that may differ between ranks, and those that may name user code (path.py:object)."""

_DIGITS = 16


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield settings by their full names (`section.key`); values that are neither sections nor plain become JSON."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, value
        else:
            yield name, json.dumps(value, default=str, sort_keys=True)


def job_settings(job: JobConfig) -> dict[str, Plain]:
    """Return all settings of a job by name; of the user's code files, only the file name."""
    settings = dict(flatten(job.model_dump()))
    for name in CODE_SETTINGS:
        value = settings.get(name)
        if isinstance(value, str) and is_user_object(value):
            settings[name] = f"{Path(file_of(value)).name}:{value.rpartition(':')[2]}"
    return settings


def of_all_ranks(settings: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the settings that must be equal on all ranks."""
    return {name: value for name, value in settings.items() if not is_within(name, OF_A_MACHINE)}


def is_within(name: str, settings: Collection[str]) -> bool:
    """Return whether a setting is one of these, or in one of these sections."""
    return any(name == other or name.startswith(f"{other}.") for other in settings)


def code_settings(job: JobConfig) -> dict[str, Plain]:
    """Return settings that identify the running code: versions, hashes of quintsched and of the job's user files."""
    return {
        "code.python": platform.python_version(),
        "code.torch": str(torch.__version__),
        "code.quintsched": f"{own_version()} ({_own_sources()})",
        **{f"code.{path.name}": _digest(_content(path)) for path in user_files(job)},
    }


def user_files(job: JobConfig) -> list[Path]:
    """Return the files of user code that a job names; raise `UsageError` if one does not exist."""
    settings = dict(flatten(job.model_dump()))
    named = [settings.get(name) for name in CODE_SETTINGS]
    files = sorted({Path(file_of(name)) for name in named if isinstance(name, str) and is_user_object(name)})
    for file in files:
        require_file(file)
    return files


def world_settings(transport: Transport) -> dict[str, Plain]:
    """Return the transport's settings: number of ranks, backend, its rules for messages, device type."""
    return {
        "world.ranks": transport.world_size,
        "world.transport": transport.name,
        "world.rules": transport.profile,
        "world.device": transport.device.type,
    }


def agreed_settings(job: JobConfig, plan: Plan, transport: Transport) -> dict[str, Plain]:
    """Return the settings of a run by name, compared over all ranks (collective).

    Raises `MisfitError`, on all ranks, where they differ.
    """
    settings = {**job_settings(job), **code_settings(job)}
    require_same(
        {
            "world": Section.from_settings(world_settings(transport)),
            "job": Section.from_settings(of_all_ranks(settings)),
            "plan": plan_section(plan),
        },
        transport.world_group(),
        "what they run",
        "start all ranks with one job file, one plan and the same code",
    )
    return settings


def agree_on_start(start: str, overrides: Sequence[str], transport: Transport) -> None:
    """Raise `MisfitError`, on all ranks, where some ranks resume a run and others do not (collective)."""
    said = Section.from_settings({"start": start, "--override": " ".join(sorted(overrides))})
    advice = "start all ranks with the same options"
    require_same({"start": said}, transport.world_group(), "how the run begins", advice)


def plan_section(plan: Plan) -> Section:
    """Return the settings of a plan: its JSON text, split into named parts only where plans differ."""
    text = plan.to_json()
    return Section(text, lambda: _parts_of_plan(text))


def _parts_of_plan(text: str) -> Record:
    data = json.loads(text)
    programs = {f"program of pp={k}": _digest(json.dumps(p).encode()) for k, p in enumerate(data.pop("programs"))}
    mesh = ",".join(f"{axis}={size}" for axis, size in data.pop("mesh"))
    return dict(flatten({"mesh": mesh, **data, **programs}, "plan."))


def own_version() -> str:
    """Return the version of the installed package."""
    try:
        return metadata.version("quintsched")
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _own_sources() -> str:
    """Return a hash of quintsched's own files: machines with different commits may have the same version."""
    root, digest = Path(quintsched.__path__[0]), hashlib.sha256()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "viz"))
        for name in sorted(files):
            if name.endswith((".py", ".yaml")):
                path = Path(folder, name)
                digest.update(str(path.relative_to(root)).encode() + b"\0" + _content(path))
    return digest.hexdigest()[:_DIGITS]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuintschedError(f"{path}: cannot read it: {error.strerror}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
