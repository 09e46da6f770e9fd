"""Checkpoints: one safetensors file per rank, and a manifest that is written last.

    with Checkpoints(DIR, keep=2).opened(engine, "resume") as saves:    DIR is this run's alone
        found = saves.newest_whole()       all ranks: sizes and hashes right? else the step before, together
        found.load(engine)                 only now a tensor is touched
        saves.save(step, progress)         a copy in the host's memory; a thread writes it
        saves.finish()                     it is on the disk, or the error of whoever could not write

Nothing in a checkpoint is ever resolved to code. `run_folder` says what lies where, `joint_write` how ranks write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quintsched.errors import InputError
from quintsched.files.atomic import writing
from quintsched.files.plain import require_folder

from ..engine import Engine
from ..saving.state_layout import RUN
from ..saving.write_tensors import WrittenFile
from ..settings.run_settings import Start
from .host_buffer import HostBuffer
from .joint_write import JointWrite
from .manifest import WHAT, DcpManifest, Manifest, file_name, make_manifest, read_manifest
from .opening import OpenRun, open_run
from .reading import LOADER, Reading, plan_digest
from .run_folder import SavedStep
from .shard_file import Layout, blocks_of, blocks_of_state, write_shard
from .writer import Writer

COSTS = "block_costs.json"
"""The file of what blocks cost, which a run that is resumed needs; see `of_job`."""

MOST_WORDS = 1000


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole.

    Attributes:
        step: after which it was saved.
        folder: where it lies.
        manifest: what it says of itself.
        skipped: later steps that are not whole, each with the reason.
        require: raises `MisfitError` where the engine cannot read it, once it is whole on all ranks.
        loader: where this rank's loader was, when all is loaded.
        load: lets an engine have its tensors; all ranks call this. Raises `MisfitError`, before any is changed.
    """

    step: int
    folder: Path
    manifest: Manifest | DcpManifest
    skipped: tuple[tuple[int, str], ...]
    require: Callable[[], None]
    loader: Callable[[], bytes | None]
    load: Callable[[], None]


class OpenCheckpoints:
    """The checkpoints of a run, in a folder that it has to itself; all ranks make the same calls.

    Args:
        engine: what is saved and loaded.
        opened: the folder.
        keep: how many of the latest checkpoints stay.
        settings: what the run was started with, which its manifests keep.
        background: whether saves are written while training goes on.
        patience_s: how long nothing may happen while ranks wait for the parts of others.
    """

    def __init__(
        self,
        engine: Engine,
        opened: OpenRun,
        keep: int,
        settings: Mapping[str, Any],
        *,
        background: bool,
        patience_s: float,
    ) -> None:
        self.engine, self.folder, self.run = engine, opened.folder, opened.run
        self._settings = settings
        self.moved = opened.words
        self._keep, self._patience_s = keep, patience_s
        self._writer, self._is_background = Writer(), background
        self._buffer = HostBuffer(engine.transport.device)

    @property
    def _rank(self) -> int:
        return self.engine.transport.rank

    def newest_whole(self) -> Found | None:
        """Return the newest checkpoint that is whole on all ranks, or None where there is none at all.

        Raises, on all ranks alike, `InputError` where there are some but none is whole, `MisfitError` for one of
        another plan.
        """
        skipped: list[tuple[int, str]] = []
        for saved in self._steps():
            found, words = self._examined(saved)
            if found is not None:
                self.engine.everyone.together(found.require)
                return replace(found, skipped=tuple(skipped))
            skipped.append((saved.step, words))
        if len(skipped) == 1:
            raise InputError(skipped[0][1])
        if skipped:
            faults = "\n  ".join(f"step {step}: {words}" for step, words in skipped)
            raise InputError(f"{self.folder.directory}: no checkpoint there is whole:\n  {faults}")
        return None

    def save(self, step: int, progress: Mapping[str, Any], loader: bytes | None = None) -> None:
        """Save every rank's state after `step`, and where its loader is; the save before has ended then.

        Raises `UsageError` on all ranks where one could not write, in the background that of the save before.
        """
        self.finish()
        self._begin_save(step, progress, loader)
        if not self._is_background:
            self.finish()

    @property
    def has_failed(self) -> bool:
        """Whether the save that is under way has failed here; `finish` then raises on all ranks."""
        return self._writer.has_failed

    def finish(self) -> None:
        """Return when the last save is on the disk; raises `UsageError` on all ranks where one could not write."""
        if self._writer.is_under_way:
            self._writer.finish(self.engine.everyone)

    def give_up(self) -> None:
        """End because the run fails: a save that is under way counts if all ranks have written their parts."""
        self._writer.give_up()

    def _begin_save(self, step: int, progress: Mapping[str, Any], loader: bytes | None) -> None:
        state = self.engine.state_dict()
        if loader is not None:
            state[LOADER] = torch.frombuffer(bytearray(loader), dtype=torch.uint8)
        said = self.engine.state_metadata()
        metadata = {key: text for key, text in said.items() if key != RUN}  # the manifest has the run
        if self._is_background:
            layout, memory = self._buffer.take(state, metadata)
            blocks = partial(blocks_of, memory)
        else:
            layout = Layout.of(state, metadata)
            blocks = partial(blocks_of_state, layout, state)
        attempt = self.folder.next_attempt()
        final, ranks = self.folder.step_folder(step), self.engine.plan.mesh.size
        joint = JointWrite(attempt, final, self._rank, ranks, self._patience_s, self._writer.given_up)
        digest, mesh = plan_digest(self.engine), self.engine.plan.mesh

        def write(folder: Path) -> WrittenFile:
            if self._rank == 0:
                self.folder.clear(attempt)
            return write_shard(folder / file_name(self._rank), layout, blocks())

        def complete(files: Sequence[WrittenFile]) -> None:
            joint.write_manifest(make_manifest(self.run, step, digest, mesh, files, progress, self._settings).to_json())
            with writing(final, WHAT):
                self.folder.complete(attempt, step, self._keep)

        self._writer.start(partial(joint.run, write, complete))

    def _steps(self) -> list[SavedStep]:
        """Return the checkpoints that the first rank sees, the newest first."""
        everyone, folder = self.engine.everyone, self.folder
        mine = everyone.together(lambda: folder.steps() if self._rank == 0 else [])
        names = json.dumps([[one.step, one.is_newer, one.folder.name] for one in mine]).encode()
        seen = json.loads(everyone.share_bytes(names)[0])
        return [SavedStep(step, is_newer, folder.directory / name) for step, is_newer, name in seen]

    def _examined(self, saved: SavedStep) -> tuple[Found | None, str]:
        """Return a checkpoint, if it is whole on all ranks, or what the first rank says that finds it is not."""

        def examine() -> tuple[Found | None, str]:
            try:
                require_folder(saved.folder, WHAT)
                return self._open(saved), ""
            except InputError as error:
                return None, str(error)

        found, words = self.engine.everyone.together(examine)
        said = self.engine.everyone.share_bytes(words.encode()[:MOST_WORDS])
        first = next((words for words in said if words), b"").decode(errors="ignore")
        return (None, first) if first else (found, "")

    def _open(self, saved: SavedStep) -> Found:
        """Return a checkpoint after a look at all that this rank reads of it; raises `InputError`, `MisfitError`."""
        manifest = read_manifest(saved.manifest, saved.step)
        reading = Reading(self.engine, saved.folder, manifest)
        return Found(saved.step, saved.folder, manifest, (), reading.require_readable, reading.loader, reading.load)


@dataclass(frozen=True)
class Checkpoints:
    """Where and how a run is saved: the latest `keep` checkpoints stay."""

    directory: Path
    keep: int
    background: bool = True
    patience_s: float = 300.0
    kind: type[OpenCheckpoints] = OpenCheckpoints

    @contextmanager
    def opened(
        self, engine: Engine, start: Start = "new", settings: Mapping[str, Any] | None = None
    ) -> Iterator[OpenCheckpoints]:
        """A context in which the folder is this run's alone; all ranks enter it. Manifests keep the settings.

        The last save has ended when it is left. Raises, on all ranks alike, `UsageError` where another run lives or was
        saved there; see `opening`.
        """
        rank = engine.transport.rank
        opened = open_run(self.directory, start, engine.everyone, rank, [COSTS])
        saves = self.kind(
            engine, opened, self.keep, settings or {}, background=self.background, patience_s=self.patience_s
        )
        try:
            try:
                yield saves
            except BaseException:
                saves.give_up()
                raise
            saves.finish()
        finally:
            if opened.lock is not None:
                opened.lock.release()
