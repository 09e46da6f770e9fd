"""A process that ends at the k-th system call that changes files: nothing that comes after it is done.

open write fsync rename …     counted; the k-th is not made, or half of it, and every later one fails as well
listdir lstat …               change nothing: they fail from then on
"""

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quintsched.files import folders

CHANGING = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "utime", "ftruncate")
LOOKING = ("lstat", "stat", "listdir", "scandir")


class Killed(BaseException):
    """Stands for the end of the process."""


class Crash:
    """Counts the calls, and ends the process at one of them; `halves`: half of a write at that call is done."""

    def __init__(self, at: int | None, *, halves: bool = False, end: Callable[[], None] | None = None) -> None:
        self.at, self.halves, self.count, self.is_dead = at, halves, 0, False
        self._end, self._lock = end, threading.Lock()
        self._write = os.write

    def changing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "write" and stat.S_ISFIFO(os.fstat(args[0]).st_mode):  # torch's own wake-ups
                return call(*args, **kwargs)
            with self._lock:
                self.require_alive()
                self.count += 1
                if self.count == self.at:
                    if name == "write" and self.halves:
                        self._write(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    self.is_dead = True
                    if self._end is not None:
                        self._end()
                    raise Killed
                return call(*args, **kwargs)

        return counted

    def looking(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: Any, **kwargs: Any) -> Any:
            self.require_alive()
            return call(*args, **kwargs)

        return looked

    def require_alive(self) -> None:
        if self.is_dead:
            raise Killed


@contextmanager
def crashing(at: int | None, **more: Any) -> Iterator[Crash]:
    """A context in which this process, all its threads, dies at the `at`-th call; None only counts."""
    crash = Crash(at, **more)
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGING:
            patch.setattr(os, name, crash.changing(name, getattr(os, name)))
        patch.setattr(folders, "exchange", crash.changing("exchange", folders.exchange))
        for name in LOOKING:
            patch.setattr(os, name, crash.looking(getattr(os, name)))
        yield crash


def every_death(act: Callable[[Path], object], begun: Path, *, halves: bool = True) -> Iterator[tuple[int, Path]]:
    """Yield a copy of a folder in which an act died at its k-th call, for each k; in the last copy it has not."""
    folder = begun.with_name("run")
    for at in count(1):
        shutil.copytree(begun, folder)
        with crashing(at, halves=halves and bool(at % 2)) as crash, suppress(Killed):
            act(folder)
        yield at, folder
        shutil.rmtree(folder)
        if not crash.is_dead:
            return
