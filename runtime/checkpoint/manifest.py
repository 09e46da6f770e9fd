"""A checkpoint's manifest: what was saved and by which plan. It is written last, so where it is the rest is too.

    {"format": "quintsched.checkpoint", "version": 1,
     "step": 120, "plan_sha256": "9f…", "mesh": "dp=2,pp=2",
     "files": [{"name": "rank-00000.safetensors", "sha256": "4c…"}, …],     one per rank of the mesh, in order
     "progress": {…}}                                                       how far the training had come

A manifest comes from a disk that may have failed and from people who copy folders, so nothing in it is taken on trust:
what is read is whole and agrees with itself, or is refused with the place of the first fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.errors import InputError, UsageError
from quintsched.files.strictjson import describe_faults, parse_strict, pointer, shorten
from quintsched.ir.mesh import Mesh

MANIFEST = "manifest.json"
"""The name of the file."""

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 in hexadecimal digits."""


class RankFile(BaseModel):
    """The file of one rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    name: str
    sha256: Digest


class Manifest(BaseModel):
    """What a checkpoint says of itself; `progress` is how far the training had come."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal["quintsched.checkpoint"]
    version: Literal[1]
    step: int = Field(ge=0)
    plan_sha256: Digest
    mesh: str
    files: list[RankFile]
    progress: dict[str, Any]

    def to_json(self) -> bytes:
        """Return the text of the file."""
        return self.model_dump_json(indent=1).encode()


class DcpManifest(BaseModel):
    """What a checkpoint in PyTorch's distributed format says of itself; `replicas` are those whose loaders it has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal["quintsched.dcp"]
    version: Literal[1]
    step: int = Field(ge=0)
    replicas: int = Field(ge=1)
    progress: dict[str, Any]

    def to_json(self) -> bytes:
        """Return the text of the file."""
        return self.model_dump_json(indent=1).encode()


def read_dcp_manifest(path: Path, step: int) -> DcpManifest:
    """Read the manifest at `path`, which is that of `step`; raises `InputError`."""
    try:
        manifest = DcpManifest.model_validate(parse_strict(path.read_bytes()))
    except OSError as error:
        raise InputError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if manifest.step != step:
        raise InputError(f"{path}: /step: it is the manifest of step {manifest.step}, but lies in the folder of {step}")
    return manifest


def file_name(rank: int) -> str:
    """Return the name of a rank's file in the folder of a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def make_manifest(
    step: int, plan_sha256: str, mesh: Mesh, digests: Sequence[bytes], progress: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of files with these SHA-256 digests, in the order of ranks."""
    return Manifest(
        format="quintsched.checkpoint",
        version=1,
        step=step,
        plan_sha256=plan_sha256,
        mesh=str(mesh),
        files=[RankFile(name=file_name(rank), sha256=digest.hex()) for rank, digest in enumerate(digests)],
        progress=dict(progress),
    )


def read_manifest(path: Path, step: int) -> Manifest:
    """Read the manifest at `path`, which is that of `step`.

    Raises `InputError` that names the file and the first fault, by its JSON pointer.
    """
    try:
        manifest = Manifest.model_validate(parse_strict(path.read_bytes()))
        _require_consistent(manifest, step)
    except OSError as error:
        raise InputError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return manifest


def _require_consistent(manifest: Manifest, step: int) -> None:
    """Raise `InputError` unless the manifest is of `step` and lists one file per rank of its mesh, in order."""
    if manifest.step != step:
        raise InputError(f"/step: it is the manifest of step {manifest.step}, but lies in the folder of step {step}")
    ranks = _ranks_of(manifest.mesh)
    for rank, file in enumerate(manifest.files[:ranks]):
        if file.name != file_name(rank):
            fault = f"the file of rank {rank} must be {file_name(rank)!r}, not {shorten(file.name)!r}"
            raise InputError(f"{pointer('files', rank, 'name')}: {fault}")
    if len(manifest.files) < ranks:
        missing = file_name(len(manifest.files))
        raise InputError(f"/files: the mesh {manifest.mesh} has {ranks} ranks, but {missing!r} is missing")
    if len(manifest.files) > ranks:
        extra = shorten(manifest.files[ranks].name)
        raise InputError(f"/files: the mesh {manifest.mesh} has {ranks} ranks, so {extra!r} is one file too many")


def _ranks_of(mesh: str) -> int:
    """Return how many ranks a mesh has that was written by `str`."""
    try:
        return Mesh.parse("" if mesh == str(Mesh()) else mesh).size
    except UsageError as error:
        raise InputError(f"/mesh: {error}") from error
