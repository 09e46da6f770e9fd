"""Checkpoints of a run: a safetensors file per rank, or PyTorch's distributed format; the manifest is written last.

    with Checkpoints(DIR, keep=2).opened(engine.saves, "resume") as run:    DIR is this run's alone
        found = run.newest_whole()         all ranks: sizes and hashes right? else the step before, together
        found.load_step()                  only now a tensor is changed
        run.save_step(step, progress)      a copy in the host's memory; a thread writes it
        run.finish()                       it is on disk, or the error of the rank that could not write

A rank reads its own file, whole, where all ranks shard their weights as the ranks that saved; else its part of all.
In PyTorch's format, ranks write before training goes on, because its table of tensors takes collectives.
No content of a checkpoint is ever resolved to code.

Also a job's checkpoint settings (folder, format, number kept), and block costs that are measured once per place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.files.atomic import write_whole, writing
from quintsched.files.read_plain_files_only import require_folder
from quintsched.files.strictjson import parse_strict
from quintsched.formats.run_plan import PLAN_FILE_NAMES as PLAN_FILES
from quintsched.formats.run_plan import file_of
from quintsched.plan import Plan

from ...blocks.dtype_names import name_of
from ...comm.host_collectives import first_said
from ...settings.allowed_setting_values import Start
from ...settings.job_file import CheckpointConfig
from ..dcp import TABLE, dcp_writer, load_dcp
from ..dcp import file_name as dcp_file_name
from ..engine_methods.engine_saves import EngineSaves
from ..index_ranges_in_full_tensors import RUN, StateLayout
from ..saved_state import SavedState
from ..write_tensors import WHAT, WrittenFile, entries_of, hash_file, require_intact, write_tensors
from .atomic_run_folder import RunFolder, SavedStep, if_there, step_folder
from .background_saves import HostBuffer, JointWrite, Writer
from .bucket_folder import Place, open_place, place_of
from .folder_owner import COSTS, OpenRun, open_run
from .manifest import MANIFEST, MANIFEST_VERSION, DcpManifest, Manifest, file_name, make_manifest, read_manifest

Format = Literal["native", "dcp"]

LOADER = "loader.state"
"""Name of the state of a rank's data loader in its file, beside its tensors."""

LOADERS = "loader.replica"
"""Prefix of the names of replicas' loader states, in PyTorch's format."""

MOST_REASON_LETTERS = 1000


def plan_digest(plan: Plan) -> str:
    """Return the fingerprint of a plan, by which a checkpoint names the plan that wrote it."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


class FoundCheckpoint:
    """A checkpoint whose files, those that this rank verifies, are intact; raises `InputError` where one is not.

    Attributes:
        step: after which it was saved.
        folder: its folder, and `where`, its name in messages.
        manifest: its manifest.
        skipped: later steps that are damaged or incomplete, each with the reason.
        loader: after `load`, the state of this replica's loader; None: none saved, or for another number of replicas.
    """

    def __init__(self, saves: EngineSaves, saved: SavedStep, home: RunFolder) -> None:
        self._saves, self.step, self.folder, self._home = saves, saved.step, saved.folder, home
        self.where = home.shown(saved.folder)
        self.skipped: tuple[tuple[int, str], ...] = ()
        self.loader: bytes | None = None
        self.manifest = manifest = read_manifest(saved.manifest, saved.step)
        self._paths = [saved.folder / file.name for file in manifest.files]
        rank, files = saves.rank.number, manifest.files
        self._fits = isinstance(manifest, Manifest) and manifest.plan_sha256 == plan_digest(saves.plan)
        for number in [rank] if self._fits else range(rank, len(files), saves.plan.mesh.size):
            if isinstance(manifest, Manifest) and self._fits and manifest.mesh != str(saves.plan.mesh):
                fault = f"the mesh is {manifest.mesh}, but that of its plan is {saves.plan.mesh}"
                raise InputError(f"{saved.manifest}: /mesh: {fault}")
            home.fetch(saved.folder, [files[number].name])
            require_intact(self._paths[number], files[number])
        self._fits = self._fits and saves.holds_file(self._paths[rank])

    def _fetch(self, *names: str) -> None:
        self._home.fetch(self.folder, names)

    def _fetch_all(self) -> None:
        self._fetch(*(file.name for file in self.manifest.files))

    def require_readable(self) -> None:
        """Raise `MisfitError` for files of another plan that have no placements of their tensors.

        All ranks have verified their share of the files before one of them calls this.
        """
        if self._fits or isinstance(self.manifest, DcpManifest):
            return
        self._fetch_all()
        saved = SavedState.of_files(self._paths)
        if saved.unplaced:
            raise MisfitError(
                f"{saved.unplaced[0]}: the checkpoint was written by another plan (mesh {self.manifest.mesh}), "
                "and does not say where its tensors lie; resume with the plan and mesh that wrote it"
            )

    def load_step(self) -> None:
        """Load the checkpoint into the engine (collective); raises `MisfitError` before any tensor is changed."""
        saves, replicas = self._saves, self._saves.rank.replicas
        if isinstance(self.manifest, DcpManifest):
            name = f"{LOADERS}{replicas[0]}"
            state = load_dcp(self.folder, saves.rank, beside=[name], fetch=self._fetch).beside[name]
            self.loader = state if isinstance(state, bytes) and self.manifest.replicas == replicas[1] else None
            return
        are_own = saves.rank.everyone.add_numbers(float(self._fits))[0] == saves.plan.mesh.size
        paths = self._paths[saves.rank.number : saves.rank.number + 1] if are_own else self._paths
        if not are_own:
            saves.rank.everyone.together(self._fetch_all)
        saves.load_state_files(paths, are_own=are_own)
        saved = SavedState.of_files(paths, lambda _: StateLayout(replicas))
        loader = saved.of_replica(LOADER, *replicas)
        self.loader = None if loader is None else loader.numpy().tobytes()


class SavedCheckpoints:
    """The checkpoints in a folder, as they are found; all ranks make the same calls.

    Args:
        saves: the state of the engine that is loaded.
        folder: the folder, or the place in a bucket.
    """

    def __init__(self, saves: EngineSaves, folder: RunFolder) -> None:
        self._saves, self.folder, self._everyone = saves, folder, saves.rank.everyone

    def newest_whole(self) -> FoundCheckpoint | None:
        """Return the newest checkpoint that is whole on all ranks, or None where the folder has none at all.

        Raises, on all ranks alike, `InputError` where there are some but none is whole, `MisfitError` for one of
        another plan.
        """
        skipped: list[tuple[int, str]] = []
        for saved in self._steps():
            found, words = self._examined(saved)
            if found is not None:
                self._everyone.together(found.require_readable)
                found.skipped = tuple(skipped)
                return found
            skipped.append((saved.step, words))
        if len(skipped) == 1:
            raise InputError(skipped[0][1])
        if skipped:
            faults = "\n  ".join(f"step {step}: {words}" for step, words in skipped)
            raise InputError(f"{self.folder.where}: no checkpoint there is whole:\n  {faults}")
        return None

    def _steps(self) -> list[SavedStep]:
        """Return the checkpoints that the first rank sees, the newest first."""
        everyone, directory = self._everyone, self.folder.directory
        mine = everyone.together(lambda: self.folder.steps() if everyone.is_first else [])
        names = json.dumps([[one.step, one.is_newer, one.folder.name] for one in mine]).encode()
        seen = json.loads(everyone.share_bytes(names)[0])
        return [SavedStep(step, is_newer, directory / name) for step, is_newer, name in seen]

    def _examined(self, saved: SavedStep) -> tuple[FoundCheckpoint | None, str]:
        """Return a checkpoint, if it is whole on all ranks, or what the first rank says that finds it is not."""

        def examine() -> tuple[FoundCheckpoint | None, str]:
            try:
                self.folder.fetch(saved.folder, [MANIFEST])
                require_folder(saved.folder, WHAT)
                return FoundCheckpoint(self._saves, saved, self.folder), ""
            except InputError as error:
                return None, self.folder.in_words(error)

        found, words = self._everyone.together(examine)
        first = first_said(words[:MOST_REASON_LETTERS], self._saves.rank.groups.world)
        return (None, first) if first else (found, "")


class OpenCheckpoints(SavedCheckpoints):
    """The checkpoints of a run, in a folder that it has to itself; all ranks make the same calls.

    Args:
        saves: the state of the engine that is saved and loaded.
        opened: the folder.
        how: how many stay, in which format, and how they are written.
        settings: what the run was started with, as it is when a manifest keeps it.
    """

    def __init__(self, saves: EngineSaves, opened: OpenRun, how: Checkpoints, settings: Mapping[str, Any]) -> None:
        super().__init__(saves, opened.folder)
        self._how, self._settings = how, settings
        self.run, self.moved = opened.run, opened.words
        self._writer, self._buffer = Writer(), HostBuffer(saves.rank.groups.world.device)

    def save_step(self, step: int, progress: Mapping[str, Any], loader: bytes | None = None) -> None:
        """Save every rank's state after `step`, and its loader's, once the previous save has ended.

        Raises `UsageError` on all ranks where one could not write; in the background, the error of the previous save.
        """
        self.finish_save()
        begin = self._save_dcp if self._how.format == "dcp" else self._begin_save
        begin(step, progress, loader)
        if not self._how.background:
            self.finish_save()

    @property
    def has_failed(self) -> bool:
        """Whether the pending save has failed on this rank; `finish_save` then raises on all ranks."""
        return self._writer.has_failed

    def finish_save(self) -> None:
        """Wait until the last save is on disk; raises `UsageError` on all ranks where one could not write."""
        if self._writer.is_under_way:
            self._writer.finish_save(self._everyone)

    def give_up(self) -> None:
        """End because the run fails: a pending save counts if all ranks have written their parts."""
        self._writer.give_up()

    def _begin_save(self, step: int, progress: Mapping[str, Any], loader: bytes | None) -> None:
        saves, attempt = self._saves, self.folder.next_attempt()
        state = saves.state_dict()
        metadata = {key: text for key, text in saves.state_metadata(state).items() if key != RUN}  # the manifest has it
        if loader is not None:
            state[LOADER] = torch.frombuffer(bytearray(loader), dtype=torch.uint8)
        entries = entries_of(state)
        if self._how.background:
            state = self._buffer.copy_state(state)
        final, mesh, digest = step_folder(self.folder.directory, step), saves.plan.mesh, plan_digest(saves.plan)
        patience_s, given_up = self._how.patience_s, self._writer.given_up
        joint = JointWrite(attempt, final, saves.rank.number, mesh.size, patience_s, given_up, self.folder)

        def write(folder: Path, state: Mapping[str, Tensor] = state) -> WrittenFile:
            if saves.rank.number == 0:
                self.folder.clear(attempt)
            parts = (state[entry.name] for entry in entries)
            return write_tensors(folder / file_name(saves.rank.number), entries, parts, metadata)

        def complete(files: Sequence[WrittenFile]) -> None:
            manifest = make_manifest(self.run, step, digest, mesh, files, progress, self._settings)
            self._complete(attempt, manifest)

        self._writer.start(partial(joint.write_part, write, complete))

    def _save_dcp(self, step: int, progress: Mapping[str, Any], loader: bytes | None) -> None:
        saves, everyone, attempt = self._saves, self._everyone, self.folder.next_attempt()
        replica, num_replicas = saves.rank.replicas
        final = step_folder(self.folder.directory, step)
        names = [dcp_file_name(saves.rank.number), *([TABLE] if everyone.is_first else [])]

        def begin() -> None:
            with writing(self.folder.shown(final), WHAT):
                if everyone.is_first:
                    self.folder.clear(attempt)
                attempt.mkdir(exist_ok=True)

        def publish() -> list[WrittenFile]:
            with writing(self.folder.shown(final), WHAT):
                written = [_written(attempt / name) for name in names]
                for name in names:
                    self.folder.publish(attempt / name, final)
            return written

        write = dcp_writer(saves.rank, {} if loader is None else {f"{LOADERS}{replica}": loader})
        everyone.together(begin)
        write(attempt)
        mine = everyone.together(publish)
        said = everyone.share_bytes(b"\n".join(file.model_dump_json().encode() for file in mine))
        manifest = DcpManifest(
            format="quintsched.dcp",
            version=MANIFEST_VERSION,
            run=self.run,
            step=step,
            replicas=num_replicas,
            files=[WrittenFile.model_validate_json(line) for lines in said for line in lines.split(b"\n")],
            settings=dict(self._settings),
            progress=dict(progress),
        )
        everyone.together(lambda: self._complete(attempt, manifest) if everyone.is_first else None)

    def _complete(self, attempt: Path, manifest: Manifest | DcpManifest) -> None:
        """Write the manifest, and rename the save to the checkpoint of its step."""
        with writing(self.folder.shown(step_folder(self.folder.directory, manifest.step)), WHAT):
            write_whole(attempt / MANIFEST, manifest.to_json(), WHAT, durable=True)
            self.folder.complete(attempt, manifest.step, self._how.keep)


def _written(path: Path) -> WrittenFile:
    """Return a written file's entry in the manifest: name, size, hash."""
    try:
        return hash_file(path)
    except InputError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoint settings of a run: folder, format, and `keep`, the number of latest checkpoints kept.

    `patience_s` is how long ranks wait for the parts of others while no file changes.
    """

    directory: Place
    keep: int
    background: bool = True
    patience_s: float = 300.0
    format: Format = "native"

    @contextmanager
    def opened(
        self, saves: EngineSaves, start: Start = "new", settings: Mapping[str, Any] | None = None
    ) -> Iterator[OpenCheckpoints]:
        """Take the folder for this run within a context; all ranks enter it. Manifests record `settings`.

        The plan is written beside the steps. Leaving it waits for the last save. Raises, on all ranks alike,
        `UsageError` where another run is active or was saved there (see `folder_owner`), or for a weight or buffer
        whose dtype the format lacks.
        """
        everyone = saves.rank.everyone
        everyone.together(
            lambda: [name_of(one.tensor.dtype, one.name) for one in saves.rank.held() if self.format == "native"]
        )
        opened = open_run(self.directory, start, everyone, [COSTS, *PLAN_FILES])
        run = OpenCheckpoints(saves, opened, self, settings or {})
        try:
            everyone.together(lambda: opened.folder.write_beside(*file_of(saves.plan)) if everyone.is_first else None)
            try:
                yield run
            except BaseException:
                run.give_up()
                raise
            run.finish_save()
        finally:
            if opened.lock is not None:
                opened.lock.release()
            opened.folder.close()


MOST_COSTS = 2**20
"""Longest file of costs that is read, in bytes."""


def checkpoints_of(config: CheckpointConfig, patience_s: float) -> Checkpoints | None:
    """Return a job's checkpoint settings; None where it saves nothing.

    The folder becomes an absolute path, so that a change of the current directory does not move it; a URL stays.
    """
    if config.dir is None:
        return None
    return Checkpoints(place_of(config.dir), config.keep, config.background, patience_s, config.format)


def remembered_costs(place: Place, blocks: int, measure: Callable[[], list[float]]) -> list[float]:
    """Return the costs of blocks as measured once for a place; the first call stores those that `measure` returns.

    Raises `InputError` for a file that holds anything else, or the costs of another number of blocks, `UsageError`
    where the place cannot be written, or a bucket does not answer.
    """
    with closing(open_place(place, os.urandom(8).hex())) as folder:
        path = folder.directory / COSTS
        kept = if_there(partial(folder.read, path, MOST_COSTS))
        found = measure() if kept is None else parse_strict(kept)
        if not isinstance(found, list) or [type(number) for number in found] != [float] * blocks:
            raise InputError(f"{folder.shown(path)}: it must hold {blocks} numbers, one for each block; remove it")
        if kept is None:
            folder.write_beside(COSTS, json.dumps(found).encode())
        return found
