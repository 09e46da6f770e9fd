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

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.files.atomic import write_whole
from quintsched.files.strictjson import parse_strict

from ..engine import Engine
from ..job.config import CheckpointConfig
from .manifest import MANIFEST, DcpManifest, file_name, make_manifest, read_dcp_manifest, read_manifest

LOADER = "loader.state"
"""The name of where a rank's loader is, beside its tensors."""


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

    def save(self, engine: Engine, step: int, progress: Mapping[str, Any], loader: bytes | None = None) -> None:
        """Save every rank's state after `step`, and where its loader is; all ranks call this.

        Raises `UsageError` if it cannot be written.
        """
        folder = self._folder(step)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if engine.transport.rank == 0:
                (folder / MANIFEST).unlink(missing_ok=True)
            engine.everyone.barrier()
            state = engine.state_dict()
            if loader is not None:
                state[LOADER] = torch.frombuffer(bytearray(loader), dtype=torch.uint8)
            tensors = _apart({name: tensor.cpu().contiguous() for name, tensor in state.items()})
            data = save(tensors, metadata=engine.state_metadata())
            _write(folder / file_name(engine.transport.rank), data)
            digests = engine.everyone.gather_bytes(hashlib.sha256(data).digest())
            if engine.transport.rank == 0:
                self._complete(folder, engine, step, progress, digests)

    def _complete(
        self, folder: Path, engine: Engine, step: int, progress: Mapping[str, Any], digests: list[bytes]
    ) -> None:
        manifest = make_manifest(step, _plan_digest(engine), engine.plan.mesh, digests, progress)
        _write(folder / MANIFEST, manifest.to_json())
        self._drop_old(step)

    def _drop_old(self, step: int) -> None:
        kept = self._complete_steps()[-self.keep :]
        for other in self._steps():
            if other not in kept and other < step:
                shutil.rmtree(self._folder(other))

    def latest(self) -> int | None:
        """Return the step of the latest complete checkpoint, or None."""
        return max(self._complete_steps(), default=None)

    def load(self, engine: Engine, step: int) -> dict[str, Any]:
        """Load this rank's state of `step` into the engine and return the progress; raises as `load_all`."""
        return self.load_all(engine, step)[0]

    def load_all(self, engine: Engine, step: int) -> tuple[dict[str, Any], bytes | None]:
        """Load this rank's state of `step` into the engine; return the progress, and where the loader was.

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
            state = load(data)
        except SafetensorError as error:
            raise InputError(f"{path}: not a safetensors file: {error}") from error
        loader = state.pop(LOADER, None)
        engine.load_state_dict(state)
        return manifest.progress, None if loader is None else loader.numpy().tobytes()

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, interrupted ones included, in rising order."""
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _complete_steps(self) -> list[int]:
        return [step for step in self._steps() if (self._folder(step) / MANIFEST).exists()]


class DcpCheckpoints(Checkpoints):
    """The same in PyTorch's distributed format, which a run on another mesh goes on from.

    DIR/step-00000120/.metadata, __0_0.distcp …    see `interchange.save_dcp`
    DIR/step-00000120/manifest.json                only now the checkpoint counts
    """

    def save(self, engine: Engine, step: int, progress: Mapping[str, Any], loader: bytes | None = None) -> None:
        """Save the state after `step`, and where the loader of each replica is; all ranks call this."""
        folder = self._folder(step)
        with _writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            engine.save_dcp(folder, beside={} if loader is None else {_loader_of(engine): loader})
            if engine.transport.rank == 0:
                manifest = DcpManifest(
                    format="quintsched.dcp", version=1, step=step, replicas=engine.num_replicas, progress=dict(progress)
                )
                _write(folder / MANIFEST, manifest.to_json())
                self._drop_old(step)
            engine.everyone.barrier()

    def load_all(self, engine: Engine, step: int) -> tuple[dict[str, Any], bytes | None]:
        """Load the state of `step` into the engine; return the progress, and where the loader was.

        Raises `InputError` for a damaged checkpoint, `MisfitError` for one of another model, or whose loaders were
        those of another number of replicas.
        """
        folder = self._folder(step)
        manifest = read_dcp_manifest(folder / MANIFEST, step)
        loaded = engine.load_dcp(folder, beside=[_loader_of(engine)])
        state = loaded.beside.get(_loader_of(engine))
        if isinstance(state, bytes) and manifest.replicas != engine.num_replicas:
            raise MisfitError(
                f"{folder}: its loaders are those of {manifest.replicas} replicas, but here there are "
                f"{engine.num_replicas}; resume with as many (dp x ep)"
            )
        return manifest.progress, state if isinstance(state, bytes) else None


def _loader_of(engine: Engine) -> str:
    return f"loader.replica{engine.replica}"


def checkpoints_of(config: CheckpointConfig) -> Checkpoints | None:
    """Return the checkpoints of a job, in the format that it names; None where it saves nothing."""
    if config.dir is None:
        return None
    kind = DcpCheckpoints if config.format == "dcp" else Checkpoints
    return kind(Path(config.dir), config.keep)


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
