"""Damaged files of a checkpoint are refused by name, and the step before is loaded.

step-00000002   whole
step-00000004   flipped, cut, swapped, linked, a FIFO, … ─▶ step 2 is loaded, and the fault of step 4 is said
"""

import json
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, seal

from .holders import load, save
from .split_models import Split, load_newest, plan_of, run_engines, save_state

Damage = Callable[[Path, random.Random], object]


def edited(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda path, draw: path.write_bytes(change(path.read_bytes(), draw))


def replaced(make: Damage) -> Damage:
    def damage(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path, draw)

    return damage


def flipped(data: bytes, draw: random.Random) -> bytes:
    return (int.from_bytes(data, "big") ^ 1 << draw.randrange(8 * len(data))).to_bytes(len(data), "big")


def swap(path: Path, draw: random.Random) -> None:
    others = [other for other in path.parent.parent.glob("step-*/*") if other.read_bytes() != path.read_bytes()]
    other, aside = draw.choice(sorted(others)), path.with_name("aside")
    for source, target in ((path, aside), (other, path), (aside, other)):
        source.rename(target)


def link(path: Path, draw: random.Random) -> None:
    home = path.parents[2] / "elsewhere"
    path.rename(home)
    path.symlink_to(home)


def make_device(path: Path, draw: random.Random) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        os.mkfifo(path)


TARGETS = ["/dev/zero", "/dev/tty", "/nowhere", "file", "/etc/passwd"]
FILES: dict[str, Damage] = {
    "flip": edited(flipped),
    "cut": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "inflate": lambda path, draw: os.truncate(path, 2 ** draw.randrange(27, 43)),  # sparse: nothing is on the disk
    "delete": lambda path, draw: path.unlink(),
    "swap": swap,
    "link": link,
    "dangling": replaced(lambda path, draw: path.symlink_to(draw.choice(TARGETS))),
    "fifo": replaced(lambda path, draw: os.mkfifo(path)),
    "directory": replaced(lambda path, draw: path.mkdir()),
    "device": replaced(make_device),
    "header": edited(  # what safetensors would believe
        lambda data, draw: (
            draw.choice([2**63, 2**64 - 1, 10**8 + 1, len(data), len(data) - 7, 0, 1]).to_bytes(8, "little") + data[8:]
        )
    ),
    "pickled": edited(lambda data, draw: pickle.dumps({"weights": list(range(draw.randrange(99)))})),
}
OFTEN = [*FILES, *["flip"] * 7, *["cut"] * 3, *["swap"] * 3, "header"]
NAMES = ["../step-00000002/rank-00000.safetensors", "/etc/passwd", "..", "", "a\0b"]
DEEP = "[" * 5000
MANIFESTS: list[Callable[[Any, Any, random.Random], object]] = [
    lambda manifest, file, draw: file.update(name=draw.choice(NAMES)),
    lambda manifest, file, draw: file.update(bytes=draw.choice([0, 2**62, file["bytes"] + 1])),
    lambda manifest, file, draw: file.update(sha256="0" * 64),
    lambda manifest, file, draw: manifest.update(progress=DEEP),
    lambda manifest, file, draw: manifest.update(files=[file] * 10000),
]


def sealed(path: Path, draw: random.Random) -> None:
    """Write a manifest whose checksum is right, and whose content is not."""
    path = path.with_name(MANIFEST)
    found = json.loads(path.read_text())
    found.pop("sha256")
    draw.choice(MANIFESTS)(found, draw.choice(found["files"]), draw)
    path.write_bytes(seal(json.dumps(found, indent=1).replace(f'"{DEEP}"', DEEP).encode()))


def folder_as_link(path: Path, draw: random.Random) -> None:
    home = path.parents[2] / "elsewhere"
    path.parent.rename(home)
    path.parent.symlink_to(home)


def folder_as_file(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path.parent)
    draw.choice([lambda: path.parent.write_bytes(b"x"), lambda: os.mkfifo(path.parent)])()


CHECKPOINTS: dict[str, Damage] = {"sealed": sealed, "folder as link": folder_as_link, "folder as file": folder_as_file}


class Watch:
    """Audit of the interpreter: unpickling, and the files that are opened."""

    def __init__(self) -> None:
        self.unpickled, self.opened, self.is_on = 0, set[str](), False
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on:
            self.unpickled += event.startswith(("pickle.", "marshal."))
            if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
                self.opened.add(os.fsdecode(arguments[0]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


WATCH = Watch()


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    for step in (2, 4):
        save(tmp_path / "whole", step, 10.0 * step, keep=2)
    return tmp_path / "whole"


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_is_refused_by_name_and_the_step_before_is_taken(count: int, two_steps: Path, tmp_path: Path) -> None:
    draw, folder = random.Random(count), tmp_path / "damaged"
    assert load(two_steps).step == 4
    WATCH.opened.clear()
    slowest = 0.0
    for number in range(count):
        shutil.copytree(two_steps, folder)
        name = draw.choice(["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
        act = draw.choice([*CHECKPOINTS, "sealed", "sealed"] if draw.random() < 0.2 else OFTEN)
        (FILES | CHECKPOINTS)[act](folder / "step-00000004" / name, draw)
        what = f"{number}: {act} of {name}"
        began = time.perf_counter()
        with WATCH.watching():
            require_refused(folder, act, what)
        slowest = max(slowest, time.perf_counter() - began)
        shutil.rmtree(folder)
        elsewhere = tmp_path / "elsewhere"
        (shutil.rmtree if elsewhere.is_dir() else Path.unlink)(elsewhere) if elsewhere.exists() else None
    assert WATCH.unpickled == 0
    here = (str(tmp_path), "/proc/", "/sys/")
    assert [path for path in WATCH.opened if not path.startswith(here)] == []
    assert not any("elsewhere" in path for path in WATCH.opened)
    assert slowest < 10


def require_refused(folder: Path, act: str, what: str) -> None:
    loaded, words = None, ""
    try:
        loaded = load(folder)
    except qs.InputError as error:
        words = str(error)
    if loaded is None:  # a swap with the other step damages both
        assert act == "swap", what
        assert all(f"step-0000000{step}/" in words for step in (2, 4)), what
        return
    if loaded.step == 4:  # what was swapped is in the other step only
        assert act == "swap", what
        return
    assert (loaded.step, loaded.number) == (2, 20.0), what
    ((bad, fault),) = loaded.skipped
    assert bad == 4, what
    assert fault.startswith(str(folder / "step-00000004")), (what, fault)
    assert "\n" not in fault, what


def save_two(mesh: str, folder: Path, form: Any) -> None:
    for step in (2, 4):
        run_engines(
            plan_of(mesh, 0), Split, lambda engine, step=step: save_state(engine, folder, step, {}, format=form)
        )


def newest(mesh: str, folder: Path, form: Any) -> list[int]:
    """Return the step that each rank loads."""
    return run_engines(plan_of(mesh, 0), Split, lambda engine: load_newest(engine, folder, format=form))


def test_the_distributed_format_is_verified_whole(tmp_path: Path) -> None:
    whole, folder, draw = tmp_path / "whole", tmp_path / "damaged", random.Random(12)
    save_two("pp=2", whole, "dcp")
    assert newest("pp=2", whole, "dcp") == [4, 4]
    names = sorted(path.name for path in (whole / "step-00000004").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST]
    for number in range(10):
        shutil.copytree(whole, folder)
        damage, name = draw.choice([one for one in OFTEN if one != "swap"]), draw.choice(names)
        FILES[damage](folder / "step-00000004" / name, draw)
        assert newest("pp=2", folder, "dcp") == [2, 2], (number, damage, name)
        shutil.rmtree(folder)
        (tmp_path / "elsewhere").unlink(missing_ok=True)


def test_files_of_another_mesh_are_verified_before_any_is_opened(tmp_path: Path) -> None:
    save_two("tp=2", tmp_path / "run", "native")
    assert newest("dp=2", tmp_path / "run", "native") == [4, 4]
    for act in ("flip", "fifo"):
        FILES[act](tmp_path / "run" / "step-00000004" / "rank-00001.safetensors", random.Random(2))
        assert newest("dp=2", tmp_path / "run", "native") == [2, 2]
