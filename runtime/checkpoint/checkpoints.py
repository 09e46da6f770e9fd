"""Checkpoints: one safetensors file per rank, and a manifest that is written last.

    DIR/step-00000120/rank-00000.safetensors …     each written under a temporary name, synced, renamed
    DIR/step-00000120/manifest.json                only now the checkpoint counts

A directory without a manifest is a checkpoint that was interrupted: it is never loaded. The manifest holds each
file's SHA-256, and nothing in a checkpoint is ever resolved to code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.files.atomic import write_whole
from quintsched.files.strictjson import parse_strict

from ..engine import Engine
from .manifest import MANIFEST, file_name, make_manifest, read_manifest


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with an earlier one, as tied weights do: a file holds each by itself."""
    seen: set[int] = set()
    found = {}
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run in a directory, of which the latest `keep` stay."""

    directory: Path
    keep: int

    def save(self, engine: Engine, step: int, progress: Mapping[str, Any]) -> None:
        """Save every rank's state after `step`; all ranks call this. Raises `UsageError` if it cannot be written."""
        folder = self._folder(step)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if engine.transport.rank == 0:
                (folder / MANIFEST).unlink(missing_ok=True)
            engine.everyone.barrier()
            data = save(_apart({name: tensor.cpu().contiguous() for name, tensor in engine.state_dict().items()}))
            _write(folder / file_name(engine.transport.rank), data)
            digests = engine.everyone.gather_bytes(hashlib.sha256(data).digest())
            if engine.transport.rank == 0:
                self._complete(folder, engine, step, progress, digests)

    def _complete(
        self, folder: Path, engine: Engine, step: int, progress: Mapping[str, Any], digests: list[bytes]
    ) -> None:
        manifest = make_manifest(step, _plan_digest(engine), engine.plan.mesh, digests, progress)
        _write(folder / MANIFEST, manifest.to_json())
        kept = self._complete_steps()[-self.keep :]
        for other in self._steps():
            if other not in kept and other < step:
                shutil.rmtree(self._folder(other))

    def latest(self) -> int | None:
        """Return the step of the latest complete checkpoint, or None."""
        return max(self._complete_steps(), default=None)

    def load(self, engine: Engine, step: int) -> dict[str, Any]:
        """Load this rank's state of `step` into the engine and return the progress.

        Raises `InputError` for a damaged or missing file, `MisfitError` for a checkpoint of another plan.
        """
        folder = self._folder(step)
        manifest = read_manifest(folder / MANIFEST, step)
        if manifest.plan_sha256 != _plan_digest(engine):
            raise MisfitError(
                f"{folder}: the checkpoint was written by another plan (mesh {manifest.mesh}); "
                "resume with the plan and mesh that wrote it"
            )
        if manifest.mesh != str(engine.plan.mesh):
            fault = f"the mesh is {manifest.mesh}, but that of its plan is {engine.plan.mesh}"
            raise InputError(f"{folder / MANIFEST}: /mesh: {fault}")
        file = manifest.files[engine.transport.rank]
        path = folder / file.name
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise InputError(f"{path}: the file is damaged: its SHA-256 is not that of the manifest")
        try:
            engine.load_state_dict(load(data))
        except SafetensorError as error:
            raise InputError(f"{path}: not a safetensors file: {error}") from error
        return manifest.progress

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, interrupted ones included, in rising order."""
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _complete_steps(self) -> list[int]:
        return [step for step in self._steps() if (self._folder(step) / MANIFEST).exists()]


def remembered(path: Path, measure: Callable[[], list[float]]) -> list[float]:
    """Return the numbers in the file at `path`; where there is none, those of `measure`, and write them there."""
    if path.exists():
        found = parse_strict(_read(path))
        if not isinstance(found, list) or not all(isinstance(number, float) for number in found):
            raise InputError(f"{path}: it must hold a list of numbers; remove it to measure anew")
        return found
    numbers = measure()
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(numbers).encode())
    return numbers


def _plan_digest(engine: Engine) -> str:
    return hashlib.sha256(engine.plan.to_json().encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the checkpoint: {error.strerror}") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{folder}: cannot write the checkpoint: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it is either not there or whole, also after a power cut."""
    write_whole(path, data, "the checkpoint", durable=True)
