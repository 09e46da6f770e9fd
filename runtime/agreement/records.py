"""The settings of a run, by name: of its job, its plan, its code and its wires.

    train.seed: 0    train.optimizer.lr: 0.001    plan.mesh: "dp=2,pp=2"    code.torch: "2.13.0"    code.mine.py: "9f…"

What may differ from machine to machine is left out (`OF_A_MACHINE`): where files lie there. What lies in them is
compared: the plan itself, the samples of a data set, a hash of files of the user's code, whose folders may differ too.
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
from quintsched.plan import Plan
from quintsched.user_code import file_of, is_user_object, require_file

from ..comm import Transport
from ..settings.job import JobConfig, marked
from ..settings.run_settings import Mark
from .sections import Plain, Record, Section, require_same

OF_A_MACHINE, CODE_SETTINGS = (tuple(marked(mark)) for mark in (Mark.OF_A_MACHINE, Mark.CODE))
"""The settings of a job that ranks need not have alike, and those that may name code of the user's."""

_DIGITS = 16


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield settings by their whole names; what is neither a section nor plain is written as JSON."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, value
        else:
            yield name, json.dumps(value, default=str, sort_keys=True)


def job_settings(job: JobConfig) -> dict[str, Plain]:
    """Return all settings of a job by name, with files of the user's by their names alone."""
    settings = dict(flatten(job.model_dump()))
    for name in CODE_SETTINGS:
        value = settings.get(name)
        if isinstance(value, str) and is_user_object(value):
            settings[name] = f"{Path(file_of(value)).name}:{value.rpartition(':')[2]}"
    return settings


def of_all_ranks(settings: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the settings that all ranks must have alike."""
    return {name: value for name, value in settings.items() if not is_within(name, OF_A_MACHINE)}


def is_within(name: str, settings: Collection[str]) -> bool:
    """Whether a setting is one of these, or in one of these sections."""
    return any(name == other or name.startswith(f"{other}.") for other in settings)


def code_settings(job: JobConfig) -> dict[str, Plain]:
    """Return which code runs: versions, a hash of quintsched's own files, and of the user's files that a job names."""
    return {
        "code.python": platform.python_version(),
        "code.torch": str(torch.__version__),
        "code.quintsched": f"{_version()} ({_own_sources()})",
        **{f"code.{path.name}": _digest(_content(path)) for path in user_files(job)},
    }


def user_files(job: JobConfig) -> list[Path]:
    """Return the files of the user's code that a job names; raises `UsageError` where one is not there."""
    settings = dict(flatten(job.model_dump()))
    named = [settings.get(name) for name in CODE_SETTINGS]
    files = sorted({Path(file_of(name)) for name in named if isinstance(name, str) and is_user_object(name)})
    for file in files:
        require_file(file)
    return files


def world_settings(transport: Transport) -> dict[str, Plain]:
    """Return what carries messages, for how many ranks, and by which rules."""
    return {
        "world.ranks": transport.world_size,
        "world.transport": transport.name,
        "world.rules": transport.profile,
        "world.device": transport.device.type,
    }


def agreed_settings(job: JobConfig, plan: Plan, transport: Transport) -> dict[str, Plain]:
    """Return the settings of a run by name (collective).

    Raises `MisfitError`, on all ranks alike, where theirs differ.
    """
    settings = {**job_settings(job), **code_settings(job)}
    require_same(
        {
            "world": Section.of(world_settings(transport)),
            "job": Section.of(of_all_ranks(settings)),
            "plan": plan_section(plan),
        },
        transport.world_group(),
        "what they run",
        "start all ranks with one job file, one plan and the same code",
    )
    return settings


def agree_on_start(start: str, overrides: Sequence[str], transport: Transport) -> None:
    """Raise `MisfitError`, on all ranks alike, where some resume a run and others do not (collective)."""
    said = Section.of({"start": start, "--override": " ".join(sorted(overrides))})
    advice = "start all ranks with the same options"
    require_same({"start": said}, transport.world_group(), "how the run begins", advice)


def plan_section(plan: Plan) -> Section:
    """Return what a plan is; its parts are told apart where plans differ."""
    text = plan.to_json()
    return Section(text, lambda: _parts_of_plan(text))


def _parts_of_plan(text: str) -> Record:
    data = json.loads(text)
    programs = {f"program of pp={k}": _digest(json.dumps(p).encode()) for k, p in enumerate(data.pop("programs"))}
    mesh = ",".join(f"{axis}={size}" for axis, size in data.pop("mesh"))
    return dict(flatten({"mesh": mesh, **data, **programs}, "plan."))


def _version() -> str:
    try:
        return metadata.version("quintsched")
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _own_sources() -> str:
    """Return a hash of the files of quintsched: machines with other commits have the same version."""
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
