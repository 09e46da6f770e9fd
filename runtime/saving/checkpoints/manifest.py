"""Manifest of a checkpoint: its files, run and plan. It is written last, so where it exists the files do too.

    {"sha256": "1b…",                                                  of every byte that follows this line's comma
     "format": "quintsched.checkpoint", "version": 2,
     "run": "5e0c…", "step": 120, "plan_sha256": "9f…", "mesh": "dp=2,pp=2",
     "files": [{"name": "rank-00000.safetensors", "bytes": 4096, "sha256": "4c…"}, …],     one per rank, in order
     "settings": {…},                                                  what the run was started with
     "progress": {…}}                                                  how far the training had come

A manifest may come from a failing disk or a folder copied by hand, so no field is trusted: a manifest that is read is
whole and consistent, or is refused with the place of the first fault. A single changed bit, white space included, is
a fault. Version 1 had no checksum of its own, no sizes and no run; it can still be read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quintsched.errors import InputError, UsageError, counted
from quintsched.files.read_plain_files_only import read_plain, require_plain_name
from quintsched.files.strictjson import describe_faults, parse_strict, pointer, shorten
from quintsched.ir.mesh import Mesh

from ..write_tensors import WHAT, Digest, WrittenFile

MANIFEST = "manifest.json"
"""File name of a manifest."""

MOST_MANIFEST_BYTES = 2**25
"""Longest manifest that is read, in bytes: that of a hundred thousand ranks is shorter."""

MANIFEST_VERSION: Final = 2

RunId = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
"""Identifier of a run, 16 hexadecimal digits."""

_SEAL = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",')


class _Sealed(BaseModel):
    """Base of all manifests: written with a checksum of the whole in the first line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def to_json(self) -> bytes:
        """Return the text of the file."""
        return seal(self.model_dump_json(indent=1).encode())


class Manifest(_Sealed):
    """Manifest of the native format; `progress` is how far the training was, `settings` what it was started with."""

    format: Literal["quintsched.checkpoint"]
    version: Literal[2]
    run: RunId | None
    step: int = Field(ge=0, lt=2**63)
    plan_sha256: Digest
    mesh: Annotated[str, Field(max_length=1000)]
    files: list[WrittenFile]
    settings: dict[str, Any] = Field(default_factory=dict)
    progress: dict[str, Any]


class DcpManifest(_Sealed):
    """Manifest of a checkpoint in PyTorch's distributed format; `replicas` counts the loader states that it has.

    Version 1 has no `files`.
    """

    format: Literal["quintsched.dcp"]
    version: Literal[2]
    run: RunId | None
    step: int = Field(ge=0, lt=2**63)
    replicas: int = Field(ge=1)
    files: list[WrittenFile] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    progress: dict[str, Any]


def file_name(rank: int) -> str:
    """Return the name of a rank's file in the folder of a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def make_manifest(
    run: str,
    step: int,
    plan_sha256: str,
    mesh: Mesh,
    files: Sequence[WrittenFile],
    progress: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of these files, in the order of ranks."""
    return Manifest(
        format="quintsched.checkpoint",
        version=MANIFEST_VERSION,
        run=run,
        step=step,
        plan_sha256=plan_sha256,
        mesh=str(mesh),
        files=list(files),
        settings=dict(settings or {}),
        progress=dict(progress),
    )


def seal(text: bytes) -> bytes:
    """Return the text of a JSON object, one key per line, with a checksum of the others as its first key."""
    rest = text.removeprefix(b"{")
    return b'{\n "sha256": "%s",' % hashlib.sha256(rest).hexdigest().encode() + rest


def read_manifest(path: Path, step: int) -> Manifest | DcpManifest:
    """Read the manifest of `step` at `path`, of either format.

    Raises `InputError` that names the file and the first fault, by its JSON pointer.
    """
    content = read_plain(path, WHAT, MOST_MANIFEST_BYTES)
    try:
        return parse_manifest(content, step)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_manifest(content: bytes, step: int) -> Manifest | DcpManifest:
    """Return the manifest of `step` with this content; raises `InputError` with the first fault."""
    found = _without_seal(content)
    kind = DcpManifest if found.get("format") == "quintsched.dcp" else Manifest
    try:
        manifest = kind.model_validate(found)
    except ValidationError as error:
        raise InputError(describe_faults(error)) from None
    if manifest.step != step:
        raise InputError(f"/step: it is the manifest of step {manifest.step}, but is in the folder of step {step}")
    if isinstance(manifest, Manifest):
        _require_ranks(manifest)
    else:
        for number, file in enumerate(manifest.files):
            try:
                require_plain_name(file.name)
            except InputError as error:
                raise InputError(f"{pointer('files', number, 'name')}: {error}") from None
    return manifest


def _without_seal(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a manifest without its checksum; raises `InputError` where that does not match."""
    sealed = _SEAL.match(content)
    if sealed and hashlib.sha256(content[sealed.end() :]).hexdigest().encode() != sealed[1]:
        raise InputError("the file is damaged: its checksum is not that of its first line")
    found = parse_strict(b"{" + content[sealed.end() :] if sealed else content)
    version = found.get("version") if isinstance(found, dict) else None
    if not isinstance(found, dict) or type(version) is not int:
        raise InputError("the file is damaged: it is no manifest with a version")
    if version > MANIFEST_VERSION:
        raise InputError(
            f"/version: {version} is newer than the {MANIFEST_VERSION} that this version of quintsched reads"
        )
    if version == MANIFEST_VERSION and not sealed:
        raise InputError("the file is damaged: its first line is not a checksum")
    return (
        found | {"version": MANIFEST_VERSION, "run": None}
        if version == 1 and not sealed and "run" not in found
        else found
    )


def _require_ranks(manifest: Manifest) -> None:
    """Raise `InputError` unless the manifest lists one file per rank of its mesh, in order."""
    try:
        ranks = (Mesh() if manifest.mesh == str(Mesh()) else Mesh.parse(manifest.mesh)).size
    except UsageError as error:
        raise InputError(f"/mesh: {error}") from error
    for rank, file in enumerate(manifest.files[:ranks]):
        if file.name != file_name(rank):
            fault = f"the file of rank {rank} must be {file_name(rank)!r}, not {shorten(file.name)!r}"
            raise InputError(f"{pointer('files', rank, 'name')}: {fault}")
    if len(manifest.files) < ranks:
        missing = file_name(len(manifest.files))
        raise InputError(f"/files: the mesh {manifest.mesh} has {counted(ranks, 'rank')}, but {missing!r} is missing")
    if len(manifest.files) > ranks:
        extra = shorten(manifest.files[ranks].name)
        raise InputError(
            f"/files: the mesh {manifest.mesh} has {counted(ranks, 'rank')}, so {extra!r} is one file too many"
        )
