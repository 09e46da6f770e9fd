"""Checkpoints in PyTorch's distributed format, which a run on another mesh goes on from.

    DIR/step-00000120/.metadata, __0_0.distcp …    see `interchange.save_dcp`
    DIR/step-00000120/manifest.json                only now the checkpoint counts

They are written before training goes on: what the ranks say to each other for the table are collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import write_whole, writing

from ..engine import Engine
from ..saving.dcp_files import TABLE
from ..saving.dcp_files import file_name as dcp_file_name
from ..saving.write_tensors import WrittenFile
from .checkpoints import Found, OpenCheckpoints
from .manifest import MANIFEST, VERSION, WHAT, DcpManifest, read_dcp_manifest
from .run_folder import SavedStep
from .shard_file import hash_file, require_intact

LOADERS = "loader.replica"
"""What the names begin with of where the loaders of replicas are."""


class OpenDcpCheckpoints(OpenCheckpoints):
    """The checkpoints of a run in that format."""

    def _begin_save(self, step: int, progress: Mapping[str, Any], loader: bytes | None) -> None:
        engine, rank = self.engine, self._rank
        attempt = self.folder.next_attempt()

        def clear() -> None:
            with writing(attempt, WHAT):
                self.folder.clear(attempt)

        def complete() -> None:
            with writing(attempt, WHAT):
                write_whole(attempt / MANIFEST, manifest.to_json(), WHAT, durable=True)
                self.folder.complete(attempt, step, self._keep)

        engine.everyone.together(clear if rank == 0 else _nothing)
        engine.save_dcp(attempt, beside={} if loader is None else {_loader_of(engine): loader})
        mine = engine.everyone.together(lambda: [_written(attempt / name) for name in _names_of(rank)])
        said = engine.everyone.share_bytes(b"\n".join(file.model_dump_json().encode() for file in mine))
        files = [WrittenFile.model_validate_json(line) for lines in said for line in lines.split(b"\n")]
        manifest = DcpManifest(
            format="quintsched.dcp",
            version=VERSION,
            run=self.run,
            step=step,
            replicas=engine.num_replicas,
            files=files,
            settings=dict(self._settings),
            progress=dict(progress),
        )
        engine.everyone.together(complete if rank == 0 else _nothing)

    def _open(self, saved: SavedStep) -> Found:
        engine = self.engine
        manifest = read_dcp_manifest(saved.manifest, saved.step)
        for file in manifest.files[self._rank :: engine.plan.mesh.size]:
            require_intact(saved.folder / file.name, file)
        loaded: dict[str, object] = {}

        def load() -> None:
            loaded.update(engine.load_dcp(saved.folder, beside=[_loader_of(engine)]).beside)

        def loader() -> bytes | None:
            state = loaded.get(_loader_of(engine))
            return state if isinstance(state, bytes) and manifest.replicas == engine.num_replicas else None

        return Found(saved.step, saved.folder, manifest, (), lambda: None, loader, load)


def _loader_of(engine: Engine) -> str:
    return f"{LOADERS}{engine.replica}"


def _names_of(rank: int) -> list[str]:
    """Return the names of what a rank writes."""
    return [dcp_file_name(rank), *([TABLE] if rank == 0 else [])]


def _written(path: Path) -> WrittenFile:
    """Return what the manifest says of a file that was written."""
    try:
        return hash_file(path)
    except InputError as error:
        raise UsageError(str(error)) from error


def _nothing() -> None:
    """Do nothing: the first rank does."""
