"""Damaged files of a checkpoint are refused by name, and the step before is loaded.

step-00000002   whole
step-00000004   flipped, cut, swapped, linked, a FIFO, … ─▶ step 2 is loaded, and the fault of step 4 is said
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import quintsched as qs
from quintsched.errors import InputError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.saving.checkpoints.checkpoints import Checkpoints, OpenCheckpoints
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST, seal

from ..toys import adam, ids_task, share, tiny_gpt
from .test_crashes import PLAN, Counter, save

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def overwrite(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at, length = draw.randrange(len(data)), draw.randrange(1, 64)
    data[at : at + length] = bytes(byte ^ 0x55 for byte in data[at : at + length])
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


def inflate(path: Path, draw: random.Random) -> None:
    os.truncate(path, 2 ** draw.randrange(27, 43))  # sparse: nothing is on the disk


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    others = [other for other in path.parent.parent.glob("step-*/*") if other.read_bytes() != path.read_bytes()]
    other = draw.choice(sorted(others))
    aside = path.with_name("aside")
    for source, target in ((path, aside), (other, path), (aside, other)):
        source.rename(target)


def link(path: Path, draw: random.Random) -> None:
    home = path.parents[2] / "elsewhere"
    path.rename(home)
    path.symlink_to(home)


def dangling(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/nowhere", path.name, "/etc/passwd"]))


def fifo(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def bound_socket(path: Path, draw: random.Random) -> None:
    path.unlink()
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def device(path: Path, draw: random.Random) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        os.mkfifo(path)


def header(path: Path, draw: random.Random) -> None:
    """Another length of the header, or another text in it: what safetensors would believe."""
    data = path.read_bytes()
    length = draw.choice([2**63, 2**64 - 1, 10**8 + 1, len(data), len(data) - 7, 0, 1])
    path.write_bytes(length.to_bytes(8, "little") + data[8:])


def pickled(path: Path, draw: random.Random) -> None:
    path.write_bytes(pickle.dumps({"weights": list(range(draw.randrange(99)))}))


def sealed(path: Path, draw: random.Random) -> None:
    """A manifest whose checksum is right, and whose content is not."""
    path = path.with_name(MANIFEST)
    found = json.loads(path.read_text())
    found.pop("sha256")
    file = draw.choice(found["files"])
    match draw.randrange(8):
        case 0:
            file["name"] = draw.choice(["../step-00000002/rank-00000.safetensors", "/etc/passwd", "..", "", "a\0b"])
        case 1:
            file["bytes"] = draw.choice([0, 2**62, file["bytes"] + 1])
        case 2:
            file["sha256"] = "0" * 64
        case 3:
            found["step"] = 5
        case 4:
            found["progress"] = "[" * 5000
            path.write_bytes(seal(json.dumps(found).replace('"' + "[" * 5000 + '"', "[" * 5000).encode()))
            return
        case 5:
            found["files"] = found["files"][:-1]
        case 6:
            found["files"] = [file] * 10000
        case _:
            del found[draw.choice(["run", "files", "format", "version", "progress"])]
    path.write_bytes(seal(json.dumps(found, indent=1).encode()))


def folder_as_link(path: Path, draw: random.Random) -> None:
    home = path.parents[2] / "elsewhere"
    path.parent.rename(home)
    path.parent.symlink_to(home)


def folder_as_file(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path.parent)
    draw.choice([lambda: path.parent.write_bytes(b"x"), lambda: os.mkfifo(path.parent)])()


OF_FILES: list[Damage] = [
    *([flip] * 8),
    *([overwrite] * 2),
    *([cut] * 4),
    grow,
    inflate,
    delete,
    *([swap] * 4),
    link,
    dangling,
    fifo,
    directory,
    bound_socket,
    device,
    *([header] * 2),
    pickled,
]
OF_CHECKPOINTS: list[Damage] = [*([sealed] * 4), folder_as_link, folder_as_file]


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


def load(folder: Path) -> list[tuple[int, float, tuple[tuple[int, str], ...]]]:
    def act(transport: Transport) -> tuple[int, float, tuple[tuple[int, str], ...]]:
        holder = Counter(PLAN, transport, 0.0)
        with Checkpoints(folder, 1).opened(cast(Any, holder), "resume") as saves:
            found = saves.newest_whole()
            assert found is not None
            found.load()
        return found.step, float(holder.loaded["model.0.weight"][0]), found.skipped

    return run_local(PLAN.mesh.size, act)


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    for step in (2, 4):
        save(tmp_path / "whole", step, 10.0 * step, keep=2)
    return tmp_path / "whole"


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_is_refused_by_name_and_the_step_before_is_taken(count: int, two_steps: Path, tmp_path: Path) -> None:
    draw, folder = random.Random(count), tmp_path / "damaged"
    assert load(two_steps)[0][0] == 4
    WATCH.opened.clear()
    slowest = 0.0
    for number in range(count):
        shutil.copytree(two_steps, folder)
        name = draw.choice(["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
        act = draw.choice(OF_CHECKPOINTS if draw.random() < 0.2 else OF_FILES)
        act(folder / "step-00000004" / name, draw)
        what = f"{number}: {act.__name__} of {name}"
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


def require_refused(folder: Path, act: Damage, what: str) -> None:
    try:
        loaded = load(folder)
    except InputError as error:
        loaded, words = [], str(error)
    if not loaded:  # a swap with the other step damages both
        assert act is swap, what
        assert "step-00000002/" in words, what
        assert "step-00000004/" in words, what
    for step, number, skipped in loaded:
        if step == 4:  # what was swapped is in the other step only
            assert act is swap, what
            continue
        assert (step, number) == (2, 20.0), what
        ((bad, fault),) = skipped
        assert bad == 4, what
        assert fault.startswith(str(folder / "step-00000004")), (what, fault)
        assert "\n" not in fault, what


@pytest.mark.parametrize("act", [*dict.fromkeys(OF_FILES), *dict.fromkeys(OF_CHECKPOINTS)], ids=lambda a: a.__name__)
def test_a_checkpoint_without_another_is_refused_by_name(act: Damage, tmp_path: Path) -> None:
    save(tmp_path / "run", 4, 40.0)
    act(tmp_path / "run" / "step-00000004" / "rank-00001.safetensors", random.Random(0))
    with pytest.raises(InputError, match=r"/step-00000004") as refused:
        load(tmp_path / "run")
    assert len(str(refused.value).partition("\non rank")[0].splitlines()) == 1


def dcp_engine(transport: Transport) -> Engine:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    return Engine(plan, tiny_gpt(8, depth=1), sum_loss, adam, transport=transport)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_the_distributed_format_is_verified_whole(count: int, tmp_path: Path) -> None:
    def act(transport: Transport, folder: Path, what: Callable[[OpenCheckpoints], Any]) -> Any:
        checkpoints = Checkpoints(folder, 2, format="dcp")
        with checkpoints.opened(dcp_engine(transport).saves, "resume") as saves:
            return what(saves)

    def both(saves: OpenCheckpoints) -> None:
        saves.save(2, {})
        saves.save(4, {})

    def newest(saves: OpenCheckpoints) -> int:
        found = saves.newest_whole()
        assert found is not None
        found.load()
        return found.step

    whole, folder, draw = tmp_path / "whole", tmp_path / "damaged", random.Random(count)
    run_local(2, lambda transport: act(transport, whole, both))
    assert run_local(2, lambda transport: act(transport, whole, newest)) == [4, 4]
    names = sorted(path.name for path in (whole / "step-00000004").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST]
    for number in range(count):
        shutil.copytree(whole, folder)
        damage, name = draw.choice([one for one in OF_FILES if one is not swap]), draw.choice(names)
        damage(folder / "step-00000004" / name, draw)
        assert run_local(2, lambda t: act(t, folder, newest)) == [2, 2], (number, damage, name)
        shutil.rmtree(folder)
        (tmp_path / "elsewhere").unlink(missing_ok=True)


def test_nothing_of_a_state_is_changed_where_it_does_not_fit(tmp_path: Path) -> None:
    def engine(transport: Transport, depth: int) -> Engine:
        plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
        return Engine(plan, tiny_gpt(8, depth=depth), sum_loss, adam, transport=transport)

    def body(transport: Transport) -> None:
        first, other = engine(transport, 1), engine(transport, 1)
        task = ids_task(1, 4, 8)
        first.step(*share(first, task.inputs[0], task.targets[0]))
        state, before = first.state_dict(), {name: t.clone() for name, t in other.state_dict().items()}
        last = [name for name in state if name.startswith("model.")][-1]
        for change in ({last: torch.zeros(3)}, {"optimizer.nothing.exp_avg": torch.zeros(1)}):
            with pytest.raises(qs.MisfitError):
                other.load_state_dict(state | change)
            assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())

    run_local(1, body)


def sum_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("act", [fifo, link, flip, header, delete])
def test_files_of_another_mesh_are_verified_before_any_is_opened(act: Damage, tmp_path: Path) -> None:
    def engine(transport: Transport, mesh: str) -> Engine:
        plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
        return Engine(plan, tiny_gpt(8, depth=1), sum_loss, adam, transport=transport)

    def begin(transport: Transport) -> None:
        with Checkpoints(tmp_path / "run", 2).opened(engine(transport, "tp=2").saves) as saves:
            saves.save(2, {})
            saves.save(4, {})

    def go_on(transport: Transport) -> int:
        with Checkpoints(tmp_path / "run", 2).opened(engine(transport, "dp=2").saves, "resume") as saves:
            found = saves.newest_whole()
            assert found is not None
            found.load()
            return found.step

    run_local(2, begin)
    assert run_local(2, go_on) == [4, 4]
    act(tmp_path / "run" / "step-00000004" / "rank-00001.safetensors", random.Random(2))
    assert run_local(2, go_on) == [2, 2]
