"""Inspection of a folder of checkpoints: list its steps, and check files against their manifests.

show     manifests and sizes: a moment, whatever the size
verify   every byte of every file
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quintsched.errors import InputError, QuintschedError, UsageError, counted, printable
from quintsched.files.read_plain_files_only import reading, require_folder

from ..checkpoints.atomic_run_folder import RunFolder, SavedStep
from ..checkpoints.bucket_folder import named_place, open_place, place_of
from ..checkpoints.manifest import MANIFEST, DcpManifest, Manifest, read_manifest
from ..write_tensors import WHAT, require_intact


@dataclass(frozen=True)
class FoundStep:
    """A checkpoint of the folder `home`, and its first fault; without a manifest no more is known of it."""

    home: RunFolder
    saved: SavedStep
    manifest: Manifest | DcpManifest | None
    fault: str | None
    is_interrupted: bool = False

    @property
    def num_bytes(self) -> int:
        """Total bytes of its files, as far as they are readable."""
        with suppress(OSError):
            return sum(filter(None, self.home.sizes(self.saved.folder).values()))
        return 0

    @property
    def where(self) -> str:
        """Its folder, as messages name it."""
        return self.home.shown(self.saved.folder)

    def words(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        manifest, said = self.manifest, {}
        if isinstance(manifest, Manifest):
            said = {"format": "native", "mesh": manifest.mesh, "ranks": len(manifest.files)}
        elif manifest is not None:
            said = {"format": "dcp", "replicas": manifest.replicas}
        if manifest is not None:
            position = {key: value for key, value in manifest.progress.items() if isinstance(value, int)}
            said |= {"run": manifest.run, "settings": manifest.settings, "progress": position}
        return {
            "step": self.saved.step,
            "folder": self.where,
            "bytes": self.num_bytes,
            "whole": self.fault is None,
            "fault": self.fault,
            **said,
        }


def find_steps(path: str, step: int | None = None) -> list[FoundStep]:
    """Return the checkpoints of a folder or a place in a bucket, or the one that `path` is itself, the newest first.

    Raises `UsageError` where there are none.
    """
    home = open_place(named_place(path))
    saved = home.steps()
    if not saved:
        parent, _, name = str(place_of(path)).rpartition("/")
        home = open_place(named_place(parent or "/"))
        saved = [one for one in home.steps() if one.folder.name == name]
    if step is not None:
        saved = [one for one in saved if one.step == step]
    if not saved:
        which = f" of step {step}" if step is not None else ""
        raise UsageError(f"{path}: there is no checkpoint{which} in it; give the folder of a run, or one of its steps")
    return [_look_at(home, one) for one in saved]


def newest_whole(path: str, step: int | None) -> tuple[FoundStep, list[FoundStep]]:
    """Return the newest checkpoint with complete files, and newer ones; raises `InputError` where none is whole."""
    found = find_steps(path, step)
    place = next((place for place, one in enumerate(found) if one.fault is None), None)
    if place is None:
        raise InputError(found[0].fault or path)
    return found[place], found[:place]


def _look_at(home: RunFolder, saved: SavedStep) -> FoundStep:
    try:
        require_folder(saved.folder, WHAT)
        with reading(saved.folder, WHAT):
            sizes = home.sizes(saved.folder)
        if MANIFEST not in sizes:
            interrupted = f"{home.shown(saved.folder)}: the checkpoint was interrupted: it has no {MANIFEST}"
            return FoundStep(home, saved, None, interrupted, is_interrupted=True)
        manifest = read_manifest(saved.manifest, saved.step)
    except InputError as error:
        return FoundStep(home, saved, None, home.in_words(error))
    for file in manifest.files:
        size, where = sizes.get(file.name), home.shown(saved.folder / file.name)
        if size is None:
            return FoundStep(home, saved, manifest, f"{where}: there is no plain file of that name")
        if file.bytes not in (None, size):
            fault = f"{where}: it has {counted(size, 'byte')}, not the {file.bytes} of the manifest"
            return FoundStep(home, saved, manifest, fault)
    return FoundStep(home, saved, manifest, None)


def verify(found: FoundStep) -> str | None:
    """Return the first fault of a checkpoint after reading all of its bytes; None: it is intact."""
    if found.fault is not None or found.manifest is None:
        return found.fault
    for file in found.manifest.files:
        try:
            found.home.fetch(found.saved.folder, [file.name])
            require_intact(found.saved.folder / file.name, file)
        except QuintschedError as error:
            return found.home.in_words(error)
    return None


def as_text(found: list[FoundStep]) -> str:
    """Return checkpoints as a table for people."""
    lines = []
    for one in found:
        manifest = one.manifest
        what = "interrupted" if one.is_interrupted else "whole" if one.fault is None else "damaged"
        mesh = manifest.mesh if isinstance(manifest, Manifest) else "any mesh (dcp)" if manifest is not None else "-"
        run = f"run {manifest.run}" if manifest is not None and manifest.run else ""
        lines.append(
            f"step {one.saved.step:>8}  {printable(mesh):<24} {_size(one.num_bytes):>10}  {what:<11} {run}".rstrip()
        )
        if one.fault is not None:
            lines.append(f"    {one.fault}")
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    exponent = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**exponent:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[exponent]}"


def as_json(found: list[FoundStep]) -> str:
    """Return checkpoints as JSON."""
    return json.dumps([one.words() for one in found], indent=1) + "\n"
