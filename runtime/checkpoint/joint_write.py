"""How the ranks of a run write one checkpoint without speaking to each other: by files in the folder of the save.

    rank r   writes rank-0000r.safetensors ─▶ fsync ─▶ rank-0000r.note says its size and its SHA-256, or what failed
    rank 0   sees all notes ─▶ manifest.json ─▶ fsync ─▶ renames the folder: only now the checkpoint counts
    rank r   sees that the folder is gone: done; or that it has a file `failed`: so the save has failed

What failed the ranks also tell each other as they end the save (`writer`): a disk that is full takes no note.

So a save needs no collective, and runs beside the steps of training, whose messages it does not disturb. Whoever waits
does so as long as something changes in the folder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from quintsched.errors import InputError, QuintschedError, UsageError, WriteError
from quintsched.files.atomic import write_whole, writing
from quintsched.files.plain import read_plain
from quintsched.files.strictjson import parse_strict

from ..comm.clock import now_s
from ..saving.write_tensors import WrittenFile
from .manifest import MANIFEST, WHAT, file_name

FAILED = "failed"
MOST_NOTE = 2**16
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.1


class Note(BaseModel):
    """What a rank says of its part: the file, or what failed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    file: WrittenFile | None = None
    error: str | None = None


class JointWrite:
    """One rank's side of a save.

    Args:
        attempt: the folder of the save.
        final: where the checkpoint will be, for messages.
        rank, ranks: which of how many.
        patience_s: how long nothing may change in the folder while this rank waits for others.
        given_up: set when nobody waits for the save any more.
    """

    def __init__(
        self, attempt: Path, final: Path, rank: int, ranks: int, patience_s: float, given_up: threading.Event
    ) -> None:
        self._attempt, self._final, self._rank, self._ranks = attempt, final, rank, ranks
        self._waiting = partial(_Waiting, final, patience_s, given_up)

    def run(self, write: Callable[[Path], WrittenFile], complete: Callable[[Sequence[WrittenFile]], None]) -> None:
        """Write this rank's part; the first rank then calls `complete` with all of them, and the others wait for it.

        Raises `WriteError` on all ranks where one of them fails.
        """
        try:
            note = self._write_part(write)
            if self._rank == 0:
                complete(self._all_parts(note))
            else:
                self._say(_note_name(self._rank), note)
                self._wait_for_end()
        except QuintschedError as error:
            self._report(error)
            raise

    def _write_part(self, write: Callable[[Path], WrittenFile]) -> Note:
        try:
            with writing(self._final, WHAT):
                self._attempt.mkdir(exist_ok=True)
                return Note(file=write(self._attempt))
        except UsageError as error:  # whatever failed: when the run began, the folder could be written
            raise WriteError(f"rank {self._rank}: {error}" if self._ranks > 1 else str(error)) from error

    def write_manifest(self, content: bytes) -> None:
        """Write the manifest, and bring all that is in the folder to the disk."""
        with writing(self._final, WHAT):
            for rank in range(1, self._ranks):
                (self._attempt / _note_name(rank)).unlink()
            write_whole(self._attempt / MANIFEST, content, WHAT, durable=True)

    def _all_parts(self, mine: Note) -> list[WrittenFile]:
        """Return what all ranks have written, when they have; raises what the first of them to fail says."""
        notes = {0: mine}
        waiting = self._waiting()
        while len(notes) < self._ranks:
            there = _sizes(self._attempt)
            if waiting.has_changed(there):
                os.utime(self._attempt)  # others see that it goes on
            for rank in range(1, self._ranks):
                if rank not in notes and _note_name(rank) in there:
                    notes[rank] = self._read(_note_name(rank))
            if len(notes) < self._ranks:
                missing = next(rank for rank in range(self._ranks) if rank not in notes)
                waiting.wait(f"rank {missing} has not written its part")
        for note in notes.values():
            if note.file is None:
                raise WriteError(note.error or "a rank could not write its part")
        return [note.file for _, note in sorted(notes.items()) if note.file is not None]

    def _wait_for_end(self) -> None:
        waiting = self._waiting()
        while (seen := _change_of(self._attempt)) is not None:
            waiting.has_changed(seen)
            if os.path.lexists(self._attempt / FAILED):
                raise WriteError(self._read(FAILED).error or "a rank could not write its part")
            waiting.wait("rank 0 has not written the manifest")

    def _report(self, error: QuintschedError) -> None:
        """Let other ranks know what failed, as far as that can be written; they know it by their patience otherwise."""
        name = FAILED if self._rank == 0 else _note_name(self._rank)
        try:
            self._say(name, Note(error=str(error)[: MOST_NOTE // 8]))
        except UsageError:
            return

    def _say(self, name: str, note: Note) -> None:
        write_whole(self._attempt / name, note.model_dump_json().encode(), WHAT)

    def _read(self, name: str) -> Note:
        path = self._attempt / name
        try:
            return Note.model_validate(parse_strict(read_plain(path, WHAT, MOST_NOTE)))
        except (InputError, ValidationError) as error:
            return Note(error=f"{path}: {error}")


def _note_name(rank: int) -> str:
    return f"rank-{rank:05d}.note"


class _Waiting:
    """Looks into a folder, ever more rarely, as long as something changes there."""

    def __init__(self, folder: Path, patience_s: float, given_up: threading.Event) -> None:
        self._folder, self._patience_s, self._given_up = folder, patience_s, given_up
        self._seen: object = None
        self._changed_s, self._poll_s = now_s(), FIRST_POLL_S

    def has_changed(self, seen: object) -> bool:
        """Return whether something else is seen than at the last look."""
        if seen == self._seen:
            return False
        self._seen, self._changed_s = seen, now_s()
        return True

    def wait(self, why: str) -> None:
        """Wait a little; raises `WriteError` that says `why` where that was long enough."""
        if self._given_up.wait(self._poll_s):
            raise WriteError(f"{self._folder}: the save was given up: {why}")
        if now_s() - self._changed_s > self._patience_s:
            raise WriteError(f"{self._folder}: the save was given up after {self._patience_s:g} s: {why}")
        self._poll_s = min(self._poll_s * 1.5, LAST_POLL_S)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of what is in a folder, in bytes, by name."""
    with writing(folder, WHAT):
        return {name: size for name in os.listdir(folder) if (size := _size(folder / name)) is not None}


def _size(path: Path) -> int | None:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return None


def _change_of(folder: Path) -> tuple[int, int | None] | None:
    """Return what changes while the first rank writes, and waits for others; None where the folder is gone."""
    with writing(folder, WHAT):
        try:
            return os.lstat(folder).st_mtime_ns, _size(folder / file_name(0))
        except FileNotFoundError:
            return None
