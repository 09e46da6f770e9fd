"""Checkpoints of a run in a bucket, through fsspec: s3://bucket/run, gs://…, memory://….

    URL/step-00000120/rank-00000.safetensors     uploaded by each rank
    URL/step-00000120/manifest.json              put last, by the first rank: without it there is no checkpoint
    URL/.saving-<launch>-<n>/rank-00001.note     results of the other ranks, for the first one
    URL/run.lock                                 renewed every few seconds while a run saves here

A bucket puts an object whole or not at all, and has neither renames nor locks that end with a process. So files go to
their final place, and count once the manifest is there, which has their sizes and hashes. Each process has a folder of
its own for the files that it uploads, and for those that it has fetched. Calls that fail are repeated some times.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from time import sleep
from typing import Any

from quintsched.errors import InputError, UsageError, counted, printable
from quintsched.files.atomic import whole_path, writing
from quintsched.files.strictjson import parse_strict, shorten

from ...comm.clocks import now_s
from ...settings.output_paths import URL, checked_place
from ..write_tensors import WHAT
from .atomic_run_folder import LEFTOVER, LOCK, OWN_FOLDER, Result, RunFolder, SavedStep, if_there, step_of
from .manifest import MANIFEST

BEAT_S = 5.0
"""Interval at which a run renews its lock; one that is not renewed for three of them is that of a dead run."""
RETRY_S = (0.1, 0.4, 1.6)
"""Pauses before a call is repeated."""

Place = Path | str
"""A folder, or the URL of one in a bucket."""


def named_place(text: str) -> Place:
    """Return a URL as it is, and the path of a folder; raises `UsageError` for what only looks like a URL."""
    return checked_place(text).rstrip("/") if URL.fullmatch(text) else Path(checked_place(text))


def place_of(text: str) -> Place:
    """Return a URL as it is, and the path of a folder made absolute."""
    place = named_place(text)
    return place if isinstance(place, str) else whole_path(place)


def open_place(place: Place, launch: str = "") -> RunFolder:
    """Return the folder of a run at a path or a URL, as one launch of the run changes it; "" changes nothing."""
    return BucketFolder(place, launch) if isinstance(place, str) else RunFolder(place, launch)


def _tried(call: Callable[..., Result], *given: Any, **named: Any) -> Result:
    """Return what a call to a bucket gives, repeated where it fails; raises `OSError`, whatever the client raises."""
    for pause_s in (*RETRY_S, None):
        try:
            return call(*given, **named)
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # clients of buckets raise errors of their own
            if pause_s is None:
                raise OSError(printable(f"{type(error).__name__}: {error}")) from error
            sleep(pause_s)
    raise AssertionError


class BucketFolder(RunFolder):
    """Folder of a run's checkpoints in a bucket; `directory` is this process's own folder for files on their way."""

    def __init__(self, url: str, launch: str) -> None:
        url = str(named_place(url))
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"{url}: {error}; a URL of checkpoints needs fsspec, and its package for the kind"
            ) from error
        own = mkdtemp(prefix="quintsched-")
        self.close = weakref.finalize(self, shutil.rmtree, own, ignore_errors=True)  # type: ignore[method-assign]
        super().__init__(Path(own), launch)
        self.where = url
        self._lock: BucketLock | None = None

    def shown(self, path: Path) -> str:
        """Return the URL of a file of `directory`."""
        return f"{self.where}/{path.relative_to(self.directory).as_posix()}"

    def in_words(self, error: Exception) -> str:
        """Return an error's message, with URLs in place of the paths of copies."""
        return str(error).replace(str(self.directory), self.where)

    def _key(self, path: Path) -> str:
        """Return the object that a file of `directory` is in the bucket."""
        return self._root if path == self.directory else f"{self._root}/{path.relative_to(self.directory).as_posix()}"

    def sizes(self, folder: Path) -> dict[str, int | None]:
        """Return the sizes of the objects below a folder, by name; folders have None."""
        try:
            found = _tried(self._files.ls, self._key(folder), detail=True)
        except FileNotFoundError:
            return {}
        own = self._key(folder).rpartition("/")[2]
        named = {one["name"].rstrip("/").rpartition("/")[2]: one for one in found}
        return {name: one["size"] if one["type"] == "file" else None for name, one in named.items() if name != own}

    def write(self, path: Path, content: bytes) -> None:
        """Put an object; raises `UsageError`."""
        with writing(self.shown(path), WHAT):
            _tried(self._files.pipe_file, self._key(path), content)

    def read(self, path: Path, most: int) -> bytes:
        """Return an object of at most `most` bytes.

        Raises `InputError` where there is none, or it is longer, `UsageError` where the bucket does not answer.
        """
        try:
            content = bytes(_tried(self._files.cat_file, self._key(path)))
        except FileNotFoundError as error:
            raise InputError(f"{self.shown(path)}: cannot read {WHAT}: it is not there") from error
        except OSError as error:
            raise UsageError(f"{self.shown(path)}: cannot read {WHAT}: {error}") from error
        if len(content) > most:
            raise InputError(f"{self.shown(path)}: it has {len(content)} bytes, more than the {most} that are read")
        return content

    def remove(self, path: Path) -> None:
        """Remove an object, or all below a folder; raises `OSError`."""
        with suppress(FileNotFoundError):
            _tried(self._files.rm, self._key(path), recursive=True)

    def fetch(self, folder: Path, names: Sequence[str]) -> None:
        """Download files of a checkpoint, unless they are here; raises as `read`."""
        folder.mkdir(exist_ok=True)
        for name in names:
            path = folder / name
            if path.exists():
                continue
            try:
                _tried(self._files.get_file, self._key(path), str(path))
            except OSError as error:
                path.unlink(missing_ok=True)
                kind = InputError if isinstance(error, FileNotFoundError) else UsageError
                raise kind(f"{self.shown(path)}: cannot read {WHAT}: {error}") from error

    def publish(self, file: Path, final: Path) -> None:
        """Upload a file of a save to the folder of its step, which is no checkpoint from then on; raises `OSError`."""
        self.remove(final / MANIFEST)
        place = final / file.name
        _tried(self._files.put_file, str(file), self._key(place))
        size = _tried(self._files.info, self._key(place))["size"]
        if size != file.stat().st_size:
            raise OSError(f"{place.name} has {counted(size, 'byte')} in the bucket, not {file.stat().st_size}")
        file.unlink()

    def steps(self) -> list[SavedStep]:
        """Return the checkpoints, those with a manifest, the newest first; raises `UsageError`."""
        try:
            found = [(step, name) for name in self.sizes(self.directory) if (step := step_of(name)) is not None]
            complete = [one for one in found if MANIFEST in self.sizes(self.directory / one[1])]
        except OSError as error:
            raise UsageError(f"{self.where}: cannot read the checkpoints: {error}") from error
        saved = [SavedStep(step, True, self.directory / name) for step, name in sorted(complete, reverse=True)]
        for one in saved:
            self.fetch(one.folder, [MANIFEST])
        return saved

    def clear(self, attempt: Path | None = None) -> None:
        """Remove notes of killed saves, except those of `attempt`; raises `UsageError`."""
        with writing(self.where, WHAT):
            for name in self.sizes(self.directory):
                if LEFTOVER.fullmatch(name) and (attempt is None or name != attempt.name):
                    self.remove(self.directory / name)

    def write_beside(self, name: str, content: bytes) -> None:
        """Put an object beside the steps; raises `UsageError` on failure."""
        self.write(self.directory / name, content)

    def complete(self, attempt: Path, step: int, keep: int) -> None:
        """Put the manifest of a save whose files are all there; then remove all but the latest `keep` steps."""
        if self._lock is None or self._lock.is_lost:
            raise OSError("another run has taken the place since")
        final = self.directory / f"step-{step:08d}"
        _tried(self._files.pipe_file, self._key(final / MANIFEST), (attempt / MANIFEST).read_bytes())
        shutil.rmtree(final, ignore_errors=True)  # what was fetched of an earlier checkpoint of this step
        shutil.rmtree(attempt, ignore_errors=True)
        try:
            self.remove(attempt)
            self._remove_others(step, keep)
        except (OSError, UsageError) as error:  # the checkpoint is complete: old ones may stay
            self._say(error)

    def _remove_others(self, step: int, keep: int) -> None:
        """Set later steps aside; remove old ones, and what killed saves left of others."""
        saved = self.steps()
        for later in (one for one in saved if one.step > step):
            self._move(later.folder, self.directory / f"set-aside-{self._launch}" / later.folder.name)
        kept = [one.folder.name for one in saved if one.step <= step][:keep]
        for name in self.sizes(self.directory):
            if step_of(name) is not None and name not in kept:
                self.remove(self.directory / name / MANIFEST)
                self.remove(self.directory / name)

    def move_to_old_runs(self, run_of: Mapping[Path, str], beside: Sequence[str]) -> list[Path]:
        """Move every step to the folder of its run below this one, with copies of the objects `beside`."""
        homes: list[Path] = []
        there = self.sizes(self.directory)
        for saved in self.steps():
            home = self.directory / f"run-{run_of.get(saved.folder, 'unknown')}"
            if home not in homes:
                homes.append(home)
                for name in there.keys() & set(beside):
                    _tried(self._files.cp_file, self._key(self.directory / name), self._key(home / name))
            self._move(saved.folder, home / saved.folder.name)
        return [Path(self.where, home.name) for home in homes]

    def _move(self, folder: Path, to: Path) -> None:
        """Move the objects of a step; the manifest comes last, and goes first."""
        names = sorted(self.sizes(folder), key=lambda name: name == MANIFEST)
        for name in names:
            _tried(self._files.cp_file, self._key(folder / name), self._key(to / name))
        for name in reversed(names):
            self.remove(folder / name)
        shutil.rmtree(folder, ignore_errors=True)

    def lock(self, instead: str = OWN_FOLDER) -> BucketLock:
        """Take the place for this launch; raises `UsageError` where another run renews its lock there.

        `instead` advises what to do then.
        """
        self._lock = BucketLock(self, self._launch, instead)
        return self._lock

    def lock_text(self) -> bytes | None:
        """Return the content of the lock, if there is one."""
        return if_there(lambda: self.read(self.directory / LOCK, 4096))

    def sees_lock(self, launch: str, patience_s: float) -> bool:
        """Return whether a launch's lock is visible, waiting at most `patience_s` for it."""
        deadline = now_s() + patience_s
        while _holder_of(self.lock_text()).get("launch") != launch:
            if now_s() > deadline:
                return False
            sleep(0.1)
        return True


def _holder_of(text: bytes | None) -> dict[str, Any]:
    try:
        found = parse_strict(text or b"{}")
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}


class BucketLock:
    """Lock that a thread renews until `release`; it ends by itself some time after its process.

    Attributes:
        is_lost: whether another run has taken it.
    """

    def __init__(self, folder: BucketFolder, launch: str, instead: str) -> None:
        self._instead, self._folder, self._path, self._launch = instead, folder, folder.directory / LOCK, launch
        self._count, self.is_lost, self._ended = 0, False, threading.Event()
        self._require_free()
        self._renew()
        sleep(BEAT_S / 10)  # of two runs that begin at once, the later writer has it
        if _holder_of(folder.lock_text()).get("launch") != launch:
            raise self._taken()
        self._thread = threading.Thread(target=self._keep, name="bucket-lock", daemon=True)
        self._thread.start()

    def _require_free(self) -> None:
        """Wait until a lock there is gone, or has not been renewed for three beats."""
        first = self._folder.lock_text()
        deadline = now_s() + 3 * BEAT_S
        while first is not None and now_s() < deadline:
            sleep(BEAT_S / 5)
            now = self._folder.lock_text()
            if now is not None and now != first:
                raise self._taken(now)
            first = now

    def _taken(self, text: bytes | None = None) -> UsageError:
        holder = _holder_of(text or self._folder.lock_text())
        who = f" (process {holder.get('pid')} on {shorten(str(holder.get('host')))})" if holder else ""
        return UsageError(f"{self._folder.where}: another run saves its checkpoints there{who}; {self._instead}")

    def _renew(self) -> None:
        self._count += 1
        told = {"launch": self._launch, "host": socket.gethostname(), "pid": os.getpid(), "count": self._count}
        self._folder.write(self._path, json.dumps(told).encode())

    def _keep(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                holder = _holder_of(self._folder.lock_text())
                if holder.get("launch", self._launch) != self._launch:
                    self.is_lost = True
                    return
                self._renew()
            except (InputError, UsageError):  # the bucket does not answer now; the next beat may find it
                continue

    def release(self) -> None:
        """Release the lock."""
        self._ended.set()
        self._thread.join(3 * BEAT_S)
        if not self.is_lost:
            with suppress(OSError):  # it ends by itself
                self._folder.remove(self._path)
