"""Settings that may change when a run resumes from a checkpoint, and those that may not without `--override`.

    kept     what is learnt, and by which rule: model, data, optimizer, batch size, seed, precision, user code
    noted    versions of quintsched, torch and Python: a difference is reported only
    free     mesh, schedule and all else of `parallel`, transport, checkpoints, logs, with user code that these alone
             name; length: epochs, patience

`--override train.optimizer.lr` lets a run resume with another learning rate; a section's name covers all its settings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from quintsched.errors import MisfitError, UsageError, nearest

from ..settings.engine_settings import SettingRule
from ..settings.job_file import marked
from .job_fingerprint_between_ranks import is_within

CODE = "code"
"""Section of the settings that describe the code (versions, hashes); a job file has no such section."""

KEPT, OPEN = ((*marked(mark), CODE) for mark in (SettingRule.KEPT, SettingRule.OPEN))
FREE = tuple(marked(SettingRule.FREE))
"""Settings or sections: those kept on resume; those without a fixed set of keys; those among the kept that may change
all the same: paths of data, options that a resumed run does not read, the length of the run.
"""

NOTED = ("code.python", "code.torch", "code.quintsched")
"""Settings whose differences are reported, and never refused."""

_SHOWN = 80


def require_kept(saved: Mapping[str, Any], now: Mapping[str, Any], overrides: Collection[str], where: str) -> list[str]:
    """Return messages about settings that differ from those of the checkpoint, and may.

    Args:
        saved: the settings in the checkpoint; if it has none, nothing is compared.
        now: the settings of this run.
        overrides: settings, or sections, that may differ.
        where: the checkpoint, in words.

    Raises:
        MisfitError: settings that must be kept differ.
        UsageError: an override that names no setting.
    """
    if not saved:
        return []
    require_known(overrides, {*saved, *now})
    different = {name: _words(name, saved, now) for name in _compared(saved, now) if _differ(name, saved, now)}
    refused = {name: words for name, words in different.items() if not is_within(name, (*overrides, *NOTED))}
    if refused:
        raise MisfitError(
            f"{where} was written with other settings: {'; '.join(refused.values())}; resume with the same, or say "
            f"{' '.join(f'--override {name}' for name in refused)} (in Python, overrides={[*refused]})"
        )
    return [f"resumed with another setting: {words}" for words in different.values()]


def require_known(overrides: Collection[str], names: Collection[str]) -> None:
    """Raise `UsageError` for an override that is neither a setting nor a section."""
    known = {*names, *(name[:end] for name in names for end, letter in enumerate(name) if letter == ".")}
    for override in overrides:
        if override not in known:
            raise UsageError(f"--override {override}: there is no such setting{nearest(override, known)}")


def _compared(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name in sorted({*saved, *now})
        if is_within(name, KEPT) and not is_within(name, FREE) and not _is_of_free_settings(name, saved, now)
    ]


def _is_of_free_settings(name: str, *settings: Mapping[str, Any]) -> bool:
    """Whether this is the code of a file, and only settings name it that may change, such as a schedule."""
    return {
        is_within(other, KEPT)
        for other, value in (item for each in settings for item in each.items())
        if str(value).startswith(f"{name.removeprefix(f'{CODE}.')}:")
    } == {False}


def _differ(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(saved[name] != now[name]) if name in saved and name in now else is_within(name, OPEN)


def _words(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{name} was {_shown(name, saved)} and is {_shown(name, now)}"


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings[name]) if name in settings else "not there"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
