"""One rank's reading of a checkpoint, of whatever mesh wrote it.

    the plan is the same, and all ranks cut their weights as then     its own file, whole
    else                                                              what it holds, of the files of all ranks

All that is read is verified first: of another mesh's files, each rank verifies some.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from quintsched.errors import InputError, MisfitError

from ..engine import Engine
from ..saving.saved_state import SavedState
from ..saving.state_layout import StateLayout
from .manifest import MANIFEST, Manifest
from .shard_file import require_intact

LOADER = "loader.state"
"""The name of where a rank's loader is, beside its tensors."""


class Reading:
    """Examines the files that a rank reads; then loads what is in them.

    Raises `InputError` for files that are not what the manifest says.
    """

    def __init__(self, engine: Engine, folder: Path, manifest: Manifest) -> None:
        self._engine = engine
        self._paths = [folder / file.name for file in manifest.files]
        self._loader: bytes | None = None
        rank, size = engine.transport.rank, engine.plan.mesh.size
        self._manifest = manifest
        self._fits = manifest.plan_sha256 == plan_digest(engine)
        if not self._fits:
            for number in range(rank, len(self._paths), size):
                require_intact(self._paths[number], manifest.files[number])
            return
        if manifest.mesh != str(engine.plan.mesh):
            fault = f"the mesh is {manifest.mesh}, but that of its plan is {engine.plan.mesh}"
            raise InputError(f"{folder / MANIFEST}: /mesh: {fault}")
        require_intact(self._paths[rank], manifest.files[rank])
        self._fits = engine.saves.holds_file(self._paths[rank])

    def require_readable(self) -> None:
        """Raise `MisfitError` for files of another plan that do not say where their tensors lie.

        All ranks have verified their share of the files before one of them calls this.
        """
        if self._fits:
            return
        with SavedState.of_files(self._paths) as saved:
            if saved.unplaced:
                raise MisfitError(
                    f"{saved.unplaced[0]}: the checkpoint was written by another plan (mesh {self._manifest.mesh}), "
                    "and does not say where its tensors lie; resume with the plan and mesh that wrote it"
                )

    def load(self) -> None:
        """Let the engine have what was saved (collective); raises `MisfitError`, before any tensor is changed."""
        engine = self._engine
        rank = engine.transport.rank
        is_own = engine.everyone.add(float(self._fits))[0] == engine.plan.mesh.size
        paths = self._paths[rank : rank + 1] if is_own else self._paths
        engine.saves.load_state_files(paths, are_own=is_own)
        with SavedState.of_files(paths, lambda _: StateLayout((engine.replica, engine.num_replicas))) as saved:
            loader = saved.of_replica(LOADER, engine.replica, engine.num_replicas)
        self._loader = None if loader is None else loader.numpy().tobytes()

    def loader(self) -> bytes | None:
        """Return where the loader of this replica was; None: there was none, or there were not as many replicas."""
        return self._loader


def plan_digest(engine: Engine) -> str:
    """Return what tells apart the plans that wrote checkpoints."""
    return hashlib.sha256(engine.plan.to_json().encode()).hexdigest()
