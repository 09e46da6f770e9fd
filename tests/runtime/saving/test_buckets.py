"""Checkpoints in buckets: resumed with the same numbers, never half a step, never two runs at one place.

memory://     in this process, for ranks that are threads
faulty://     the same, with a fault at a chosen call: failing once, gone for good, read-only, half an object
s3://         s3fs with a server of moto, where both are installed
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import quintsched as qs
from quintsched.errors import QuintschedError
from quintsched.runtime.launch.local_launcher import _make_folders
from quintsched.runtime.saving.checkpoints import bucket_folder
from quintsched.runtime.saving.checkpoints.bucket_folder import BucketFolder
from quintsched.runtime.settings.job_file import JobConfig

from ...helpers import jobs
from ...helpers.jobs import data_file, figures, fit, interrupt_after
from .holders import load, save

__all__ = ["data_file"]


class FaultyMemory(MemoryFileSystem):
    """A bucket in memory that fails at a call, counted from `arm`."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    kind, left = "", -1
    counting = threading.Lock()

    @classmethod
    def arm(cls, kind: str, call: int) -> None:
        """Fail at a call of a kind of fault; "" ends it."""
        cls.kind, cls.left = kind, call

    def _passes(self, writes: bool) -> str:
        """Count a call; return the fault that it has."""
        with self.counting:
            FaultyMemory.left -= 1
            at_fault = self.left == -1 if self.kind == "once" else self.left < 0
        if not self.kind or not at_fault or (self.kind == "read-only" and not writes):
            return ""
        return self.kind

    def _fail(self, kind: str) -> None:
        if kind:
            raise PermissionError(13, "Access Denied") if kind == "read-only" else OSError("503 Slow Down")

    def pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        self._put(path, value)

    def put_file(self, lpath: str, rpath: str, **named: Any) -> None:
        self._put(rpath, Path(lpath).read_bytes())

    def _put(self, path: str, value: bytes) -> None:
        kind = self._passes(writes=True)
        if kind == "half":
            super().pipe_file(path, value[: len(value) // 2])
        self._fail(kind)
        super().pipe_file(path, value)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._fail(self._passes(writes=True))
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def cat_file(self, path: str, *given: Any, **named: Any) -> bytes:
        self._fail(self._passes(writes=False))
        return bytes(super().cat_file(path, *given, **named))

    def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        self._fail(self._passes(writes=False))
        return super().ls(path, detail=detail, **named)


fsspec.register_implementation("faulty", FaultyMemory, clobber=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_folder, "BEAT_S", 0.02)
    monkeypatch.setattr(bucket_folder, "RETRY_S", (0.0, 0.0))


@pytest.fixture
def bucket() -> str:
    return f"memory://runs/{uuid4().hex}"


def job(data_file: Path, place: str | None, mesh: str = "pp=2", **checkpoint: Any) -> Any:
    """A job of six steps an epoch, two epochs."""
    saved = {"dir": place} | checkpoint
    return jobs.job(data_file, parallel={"mesh": mesh}, train={"epochs": 2}, checkpoint=saved)


def names_in(place: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(place)
    return sorted(one["name"].rpartition("/")[2] for one in files.ls(root, detail=True))


@pytest.mark.parametrize("background", [False, True])
def test_a_run_resumes_from_a_bucket_with_the_same_numbers(data_file: Path, bucket: str, background: bool) -> None:
    config = job(data_file, bucket, every=4, background=background)
    interrupt_after(config, steps=10)
    assert names_in(bucket) == ["plan.json", "step-00000004", "step-00000008"]
    with pytest.raises(qs.UsageError, match=f"{bucket}: an earlier run was saved there, up to step 8; .*--resume"):
        fit(config)
    resumed, _, said = fit(config, resume=True)[0]
    assert "resumed after step 8" in said
    assert figures(resumed) == figures(fit(job(data_file, None))[0][0])
    assert names_in(bucket) == ["plan.json", "step-00000008", "step-00000012"]


def test_a_run_resumes_on_another_mesh_and_a_fresh_one_moves_it_away(data_file: Path, bucket: str) -> None:
    interrupt_after(job(data_file, bucket, every=4), steps=10)
    other = job(data_file, bucket, mesh="dp=2", every=4)
    assert "resumed after step 8" in fit(other, resume=True)[0][2]
    fit(other, fresh=True)
    (old,) = [name for name in names_in(bucket) if name.startswith("run-")]
    assert names_in(f"{bucket}/{old}") == ["plan.json", "step-00000008", "step-00000012"]


def test_a_second_run_at_a_place_is_refused_and_a_dead_one_is_not_waited_for(bucket: str) -> None:
    first = BucketFolder(bucket, "1" * 16)
    lock = first.lock()
    with pytest.raises(qs.UsageError, match=rf"{bucket}: another run saves its checkpoints there \(process \d+ on "):
        save(bucket, 1, 10.0)
    lock._ended.set()  # as if its process had been killed
    lock._thread.join()
    first.close()
    save(bucket, 1, 10.0)
    assert names_in(bucket) == ["plan.json", "step-00000001"]


def test_a_run_that_has_lost_its_place_puts_no_manifest(bucket: str) -> None:
    first = BucketFolder(bucket, "1" * 16)
    lock = first.lock()
    other = BucketFolder(bucket, "2" * 16)
    other.write_beside("run.lock", b'{"launch": "2222222222222222"}')
    lock._thread.join(5)
    assert lock.is_lost
    with pytest.raises(OSError, match="another run has taken the place"):
        first.complete(first.next_attempt(), 1, 1)
    first.close()
    other.close()


FAULTS = [
    (kind, background, first)
    for kind in ("once", "gone", "read-only", "half")
    for background in (False, True)
    for first in range(0, 25, 5)
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "background", "first"), FAULTS)
def test_200_faults_leave_a_whole_step_and_one_that_passes_is_not_seen(kind: str, background: bool, first: int) -> None:
    for call in range(first, first + 5):
        place = f"faulty://runs/{uuid4().hex}"
        save(place, 1, 10.0)
        failed = ""
        try:
            FaultyMemory.arm(kind, call)
            save(place, 2, 20.0, background=background)
        except QuintschedError as error:
            failed = str(error)
        finally:
            is_reached = FaultyMemory.left < 0
            FaultyMemory.arm("", -1)
        assert is_reached
        if kind == "once":
            assert failed == ""
        assert not failed or place in failed
        loaded = load(place)
        assert loaded is not None
        found = loaded.step, loaded.number
        assert found in ([(1, 10.0), (2, 20.0)] if failed else [(2, 20.0)])
        save(place, 3, 30.0)
        assert names_in(place) == ["plan.json", "step-00000003"]


def test_a_bucket_is_no_folder_that_a_launcher_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, made in (("memory://runs/1", []), ("runs/1", ["runs"])):
        asked = JobConfig(checkpoint={"dir": place})
        _make_folders(asked, 0)
        assert [path.name for path in tmp_path.iterdir()] == made
        assert (asked.checkpoint.folder is None, asked.folder) == (not made, Path("runs/1") if made else None)


def test_what_a_bucket_does_not_do_is_refused(data_file: Path, bucket: str) -> None:
    with pytest.raises(qs.UsageError, match="dcp writes into a folder, not to memory://"):
        fit(job(data_file, bucket, format="dcp"))
    with pytest.raises(qs.UsageError, match=r"nowhere://runs/1: .*nowhere"):
        fit(job(data_file, "nowhere://runs/1"))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="needs pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="needs pip install s3fs")
    started = server.ThreadedMotoServer(port=0)
    started.start()
    host, port = started.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "a", "secret": "b"}
    fsspec.config.conf["s3"] = options
    fsspec.filesystem("s3").mkdir("runs")
    yield "s3://runs"
    fsspec.config.conf.pop("s3")
    started.stop()


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.filterwarnings("default")
def test_a_run_resumes_from_s3_with_the_same_numbers(data_file: Path, s3: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(bucket_folder, "BEAT_S", 0.5)
    place = f"{s3}/{uuid4().hex}"
    config = job(data_file, place, every=4)
    interrupt_after(config, steps=10)
    resumed, _, said = fit(config, resume=True)[0]
    assert "resumed after step 8" in said
    assert figures(resumed) == figures(fit(job(data_file, None))[0][0])
    assert names_in(place) == ["plan.json", "step-00000008", "step-00000012"]
    other = BucketFolder(place, "1" * 16)
    lock = other.lock()
    with pytest.raises(qs.UsageError, match="another run saves its checkpoints there"):
        fit(config, resume=True)
    lock.release()
    other.close()
