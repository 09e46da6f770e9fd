"""Asynchronous saves: a thread of each rank writes while training goes on; all ranks' writes complete together.

    step 120   state ──copy──▶ buffer on the host ──▶ rank r: rank-0000r.safetensors ─▶ fsync ─▶ rank-0000r.note
    step 121   state changes        │                 rank 0: sees all notes ─▶ manifest.json ─▶ renames the folder
    step 240   state ──copy──▶ the same buffer, when all ranks know that all have written, or which one could not

A note has the size and the SHA-256 of a rank's file, or an error. So the threads need no collective, and do not
disturb the training's messages; rank 0 waits for notes as long as files in the folder change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from quintsched import errors
from quintsched.errors import InputError, QuintschedError, UsageError, WriteError
from quintsched.files.atomic import writing
from quintsched.files.strictjson import parse_strict

from ...comm.clocks import now_s
from ...comm.device import is_accelerator, synchronize
from ...comm.host_collectives import MOST_ERROR_BYTES, ControlGroup
from ..write_tensors import WHAT, WrittenFile, entries_of
from .atomic_run_folder import RunFolder

MOST_NOTE = 2**16
FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.1
"""Shortest and longest interval at which the first rank polls the folder."""
FIRST_POLL_S, LAST_POLL_S = 0.01, 0.25
"""Shortest and longest time that a rank waits for its own thread before ranks exchange their states again."""
LAST_PATIENCE_S, OWN_PART_S = 2.0, 30.0
"""Time that a failing run waits for a pending save: for other ranks' parts, and for its own."""
UNDER_WAY, WRITTEN, FAILED = b"u", b"w", b"f"


class HostBuffer:
    """Host copies of a rank's state, pinned for an accelerator; the memory is reused from save to save."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors on the host, which the next call overwrites."""
        entries = entries_of(state)
        num_bytes = sum(entry.nbytes for entry in entries)
        if len(self._memory) != num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer first: never two at a time
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_accelerator(self._device))
        parts = self._memory.split([entry.nbytes for entry in entries])
        copies = {e.name: part.view(e.dtype).view(e.shape) for e, part in zip(entries, parts, strict=True)}
        for name, copy in copies.items():
            copy.copy_(state[name], non_blocking=True)
        synchronize(self._device)
        return copies


class SaveOutcome(BaseModel):
    """Result of a rank's part of a save: its file, or an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    file: WrittenFile | None = None
    error: str | None = None


@dataclass(frozen=True)
class JointWrite:
    """One rank's part in a save.

    Attributes:
        attempt: the folder of the save.
        final: the checkpoint's final path, for messages.
        rank: its number.
        ranks: how many there are.
        patience_s: how long the first rank waits for others while no file in the folder changes.
        given_up: set when no rank waits for the save any more.
        folder: the folder of the run; by default one that all ranks see.
    """

    attempt: Path
    final: Path
    rank: int
    ranks: int
    patience_s: float
    given_up: threading.Event
    folder: RunFolder = field(default_factory=lambda: RunFolder(Path(), ""))

    def write_part(
        self, write: Callable[[Path], WrittenFile], complete: Callable[[Sequence[WrittenFile]], None]
    ) -> None:
        """Write this rank's part; the first rank then calls `complete` with the files of all.

        Raises `WriteError` where this rank fails, on the first one also where another does.
        """
        try:
            with writing(self.folder.shown(self.final), WHAT):
                self.attempt.mkdir(exist_ok=True)
                mine = write(self.attempt)
                self.folder.publish(self.attempt / mine.name, self.final)
        except UsageError as error:  # any failure counts as one of writing: the folder was writable when the run began
            words = f"rank {self.rank}: {error}" if self.ranks > 1 else str(error)
            if self.rank:
                with suppress(UsageError):  # a full disk takes no note; ranks exchange errors as the save ends
                    self._say(SaveOutcome(error=words[: MOST_NOTE // 8]))
            raise WriteError(words) from error
        if self.rank:
            self._say(SaveOutcome(file=mine))
            return
        files = [mine, *self._others()]
        with writing(self.folder.shown(self.final), WHAT):
            for rank in range(1, self.ranks):
                self.folder.remove(self._note(rank))
            complete(files)

    def _others(self) -> list[WrittenFile]:
        """Return the files of the other ranks, once all are written; raises the error of the first rank that failed."""
        found: dict[int, WrittenFile] = {}
        seen: dict[str, int | None] = {}
        changed_s, look_s, where = now_s(), FIRST_LOOK_S, self.folder.shown(self.final)
        while True:
            with writing(self.folder.shown(self.final), WHAT):
                there = self.folder.sizes(self.attempt)
            for rank in range(1, self.ranks):
                if rank not in found and self._note(rank).name in there:
                    found[rank] = self._read(rank)
            if len(found) == self.ranks - 1:
                return [file for _, file in sorted(found.items())]
            if there != seen:
                seen, changed_s = there, now_s()
            missing = next(rank for rank in range(1, self.ranks) if rank not in found)
            why = f"rank {missing} has not written its part"
            if self.given_up.wait(look_s):
                raise WriteError(f"{where}: the save was given up: {why}")
            if now_s() - changed_s > self.patience_s:
                raise WriteError(f"{where}: the save was given up after {self.patience_s:g} s: {why}")
            look_s = min(look_s * 1.5, LAST_LOOK_S)

    def _note(self, rank: int) -> Path:
        return self.attempt / f"rank-{rank:05d}.note"

    def _say(self, note: SaveOutcome) -> None:
        self.folder.write(self._note(self.rank), note.model_dump_json().encode())

    def _read(self, rank: int) -> WrittenFile:
        path = self._note(rank)
        try:
            note = SaveOutcome.model_validate(parse_strict(self.folder.read(path, MOST_NOTE)))
        except (InputError, ValidationError) as error:
            raise WriteError(f"{path}: {error}") from error
        if note.file is None:
            raise WriteError(note.error or "a rank could not write its part")
        return note.file


class Writer:
    """Runs one save after the other, each in a thread.

    Attributes:
        given_up: set when no rank waits for a save any more, so that the thread stops waiting for other ranks.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.given_up = threading.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether a save was started and not yet waited for."""
        return self._thread is not None

    @property
    def has_failed(self) -> bool:
        """Whether the pending save has ended with an error."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Start a save in a thread; the previous one has been waited for."""
        self.given_up.clear()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish_save(self, everyone: ControlGroup) -> None:
        """Wait until the pending save is on disk; all ranks call this.

        Raises the same error on all ranks as soon as one could not write; the others are not waited for.
        """
        poll_s = FIRST_POLL_S
        while True:
            said = everyone.share_bytes(self._state(poll_s))
            failed = next((words[1:].decode(errors="replace") for words in said if words[:1] == FAILED), None)
            if failed is not None:
                self._raise(failed)
            if all(words == WRITTEN for words in said):
                self._thread = None
                return
            poll_s = min(2 * poll_s, LAST_POLL_S)

    def give_up(self) -> None:
        """Give a pending save a short time to end as the run fails; it then counts, or is as if it had not begun."""
        if self._thread is not None:
            self._thread.join(LAST_PATIENCE_S)
            self.given_up.set()
            self._thread.join(OWN_PART_S)
        self._thread = self._error = None

    def _state(self, poll_s: float) -> bytes:
        """Return the save's state, after `poll_s` if it has not ended; raises errors that are not of this package."""
        assert self._thread is not None
        self._thread.join(poll_s)
        error = self._error
        if error is not None and not isinstance(error, QuintschedError):
            self._thread = self._error = None
            raise error
        if error is not None:
            return FAILED + f"{type(error).__name__}:{error}".encode(errors="replace")[:MOST_ERROR_BYTES]
        return UNDER_WAY if self._thread.is_alive() else WRITTEN

    def _raise(self, failed: str) -> None:
        """Raise the error that the first failing rank reported."""
        error, thread = self._error, self._thread
        self.given_up.set()
        if thread is not None:
            thread.join(OWN_PART_S)
        self._thread = self._error = None
        kind, _, words = failed.partition(":")
        raised: type[QuintschedError] = getattr(errors, kind, UsageError)
        raise raised(words) from error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
