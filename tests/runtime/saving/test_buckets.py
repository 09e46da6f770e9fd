"""Checkpoints in buckets: resumed with the same numbers, never half a step, never two runs at one place.

memory://     in this process, for ranks that are threads
faulty://     the same, with a fault at a chosen call: failing once, gone for good, read-only, half an object
s3://         s3fs with a server of moto, where both are installed
gs://         gcsfs with gcp-storage-emulator, likewise
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

import quintsched as qs
from quintsched.runtime import Engine, JobConfig
from quintsched.runtime.saving.checkpoints import bucket_folder
from quintsched.runtime.saving.checkpoints.bucket_folder import BucketFolder
from quintsched.runtime.saving.checkpoints.manifest import MANIFEST

from ...helpers import jobs
from ...helpers.jobs import figures, fit, interrupt_after
from .holders import PLAN, load, save
from .split_models import Split, load_newest, run_command, run_engines, save_state


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

    def _count(self, writes: bool, half: Callable[[], object] = lambda: None) -> None:
        """Count a call, and raise the fault that it has; the fault "half" acts first."""
        with self.counting:
            FaultyMemory.left -= 1
            at_fault = self.left == -1 if self.kind == "once" else self.left < 0
        if not self.kind or not at_fault or (self.kind == "read-only" and not writes):
            return
        if self.kind == "half":
            half()
        raise PermissionError(13, "Access Denied") if self.kind == "read-only" else OSError("503 Slow Down")

    def pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        put = super().pipe_file
        self._count(True, lambda: put(path, value[: len(value) // 2]))
        put(path, value)

    def put_file(self, lpath: str, rpath: str, **named: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cp_file(self, path1: str, path2: str, **named: Any) -> None:
        self._count(True)
        super().cp_file(path1, path2, **named)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._count(True)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def cat_file(self, path: str, *given: Any, **named: Any) -> bytes:
        self._count(False)
        return bytes(super().cat_file(path, *given, **named))

    def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        self._count(False)
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
    checkpoint |= {"dir": place}
    return jobs.job(data_file, parallel={"mesh": mesh}, train={"epochs": 2}, checkpoint=checkpoint)


def names_in(place: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(place)
    files.invalidate_cache()  # stores in the cloud keep what they have listed
    names = (one["name"].rpartition("/")[2] for one in files.ls(root, detail=True))
    return sorted(name for name in names if name != "run.lock")


HOW = [{"background": True}, {"format": "dcp"}]


@pytest.mark.parametrize(("kind", "how"), [("folder", HOW[0]), *(("bucket", how) for how in HOW)], ids=str)
def test_a_run_resumes_with_the_same_numbers_and_a_fresh_one_moves_it_away(data_file, bucket, tmp_path, kind, how):
    check_resumed(data_file, bucket if kind == "bucket" else str(tmp_path / "saved"), how)


def check_resumed(data_file: Path, bucket: str, how: dict[str, Any]) -> None:
    config = job(data_file, bucket, every=4, **how)
    interrupt_after(config, steps=10)
    assert names_in(bucket) == ["plan.json", "step-00000004", "step-00000008"]
    with pytest.raises(qs.UsageError, match=f"{bucket}: an earlier run was saved there, up to step 8; .*--resume"):
        fit(config)
    resumed, _, said = fit(config, resume=True)[0]
    assert "resumed after step 8" in said
    assert figures(resumed) == figures(fit(job(data_file, None))[0][0])
    assert names_in(bucket) == ["plan.json", "step-00000008", "step-00000012"]
    other = job(data_file, bucket, mesh="dp=2", every=4, **how)
    assert "resumed after step 12" in fit(other, resume=True)[0][2]
    fit(other, fresh=True)
    (old, *fresh) = sorted(names_in(bucket), key=lambda name: not name.startswith("run-"))
    assert fresh == ["plan.json", "step-00000008", "step-00000012"]
    assert names_in(f"{bucket}/{old}") == ["plan.json", "step-00000008", "step-00000012"]
    for place in (bucket, f"{bucket}/{old}"):
        said = fit(job(data_file, place, mesh="dp=2", every=4, **how), resume=True)[0][2]
        assert said[-2:] == ["resumed after step 12", "nothing is left to train: it has 12 steps"]


def test_commands_take_the_url_of_a_run(data_file: Path, bucket: str, tmp_path: Path, capsys: Any) -> None:
    check_commands(job(data_file, bucket, every=4), tmp_path, capsys)


def check_commands(config: JobConfig, folder: Path, capsys: Any) -> None:
    """Save a run in a bucket; show, verify, export it, reshard and import into others, and resume from these."""
    place, one = str(config.checkpoint.dir), str(folder / "model.safetensors")
    ranks = fit(config)
    weights = {name: tensor for _, of_rank, _ in ranks for name, tensor in of_rank.items()}
    step = f"{place}/step-00000012"

    def said(command: str, path: object, *, code: int = 0, **given: Any) -> str:
        assert run_command(command, path, json=True, **given) == code
        printed = capsys.readouterr()
        return str(printed.err if code else printed.out)

    (shown,) = json.loads(said("show", step))
    assert (shown["folder"], shown["mesh"], shown["whole"]) == (step, "pp=2", True)
    assert [found["step"] for found in json.loads(said("show", place))] == [12, 8]
    said("export", place, output=one)
    exported = load_file(one)
    assert exported.keys() == weights.keys()
    assert all(exported[name].equal(tensor) for name, tensor in weights.items())
    assert "a run has saved there, up to step 12; give -o another" in said("import", one, output=place, code=2)
    made = json.loads(said("reshard", place, mesh="dp=2", output=f"{place}-dp"))
    assert made["folder"] == f"{place}-dp/step-00000012"
    assert json.loads(said("verify", f"{place}-dp"))[0]["whole"]
    said("import", one, output=f"{place}-begin")
    for place_made, mesh, step_made in ((f"{place}-dp", "dp=2", 12), (f"{place}-begin", "pp=2", 0)):
        changes = {"checkpoint": {"dir": place_made}, "parallel": {"mesh": mesh}}
        other = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
        assert f"resumed after step {step_made}" in fit(config.model_copy(update=other), resume=True)[0][2]
    assert "weights for others are on a disk" in said("export", place, output=f"{place}/w.safetensors", code=2)
    files, root = fsspec.core.url_to_fs(step)
    files.pipe_file(f"{root}/rank-00001.safetensors", b"cut off")
    assert f"{step}/rank-00001.safetensors: it has 7 bytes, not the" in said("verify", place, code=1)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_stages_are_cut_alike_when_a_measured_run_is_resumed(data_file, bucket, tmp_path, kind):
    check_measured(data_file, bucket if kind == "bucket" else str(tmp_path))


def check_measured(data_file: Path, place: str) -> None:
    """Train with measured stages; costs are kept at the place, cut the stages there again, and are checked."""
    model, parallel = {"options": {"hidden": 8, "depth": 4, "heads": 2}}, {"mesh": "pp=2", "balance": "measured"}
    config = jobs.job(data_file, model=model, parallel=parallel, train={"epochs": 1}, checkpoint={"dir": place})
    files, root = fsspec.core.url_to_fs(place)
    costs = f"{root}/block_costs.json"
    before = [sorted(weights) for _, weights, _ in fit(config)]
    measured = json.loads(files.cat_file(costs))
    assert len(measured) == 6
    assert [sorted(weights) for _, weights, _ in fit(config, resume=True)] == before
    assert json.loads(files.cat_file(costs)) == measured
    files.pipe_file(costs, b"[9.0, 0.1, 0.1, 0.1, 0.1, 0.1]")
    assert len(fit(config, resume=True)[0][1]) < len(before[0])
    for content in (b"{}", b"[1.0]"):
        files.pipe_file(costs, content)
        with pytest.raises(qs.InputError, match=rf"{place}/block_costs\.json: it must hold 6 numbers"):
            fit(config, resume=True)


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


def with_fault(kind: str, call: int, act: Callable[[], object]) -> str:
    """Act with a fault at a call, which has to be reached, and return what is said of it."""
    FaultyMemory.arm(kind, call)
    try:
        act()
        failed = ""
    except qs.QuintschedError as error:
        failed = str(error)
    finally:
        is_reached = FaultyMemory.left < 0
        FaultyMemory.arm("", -1)
    assert is_reached
    return failed


KINDS = ("once", "gone", "read-only", "half")


def require_whole_steps(
    kind: str, calls: int, keep: int, save: Callable[..., object], load: Callable[..., Any]
) -> None:
    for call in range(calls):
        place = f"faulty://runs/{uuid4().hex}"
        save(place, 1, 10.0)
        failed = with_fault(kind, call, lambda place=place: save(place, 2, 20.0))
        assert not failed or (place in failed and kind != "once")
        loaded = load(place)
        assert (loaded.step, loaded.number) in ([(1, 10.0), (2, 20.0)] if failed else [(2, 20.0)])
        save(place, 3, 30.0)
        left = {*names_in(place)} - {"plan.json"}
        assert len(left) == keep
        assert "step-00000003" in left


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "background"), [(kind, background) for background in (False, True) for kind in KINDS])
def test_200_faults_leave_a_whole_step_and_one_that_passes_is_not_seen(kind: str, background: bool) -> None:
    require_whole_steps(kind, 25, 1, partial(save, background=background), load)


def test_a_move_that_is_cut_off_at_any_call_leaves_the_step_whole() -> None:
    failed, call = True, 0
    while failed:
        place = f"faulty://runs/{uuid4().hex}"
        save(place, 1, 10.0)
        folder = BucketFolder(place, "1" * 16)
        FaultyMemory.arm("gone", call)
        try:
            folder.move_to_old_runs({}, ["plan.json"])
            failed = False
        except (OSError, qs.UsageError):
            call += 1
        finally:
            FaultyMemory.arm("", -1)
            folder.close()
        there = [where for where in (place, f"{place}/run-unknown") if is_there(f"{where}/step-00000001/{MANIFEST}")]
        assert there
        assert [load(where).number for where in there] == [10.0] * len(there)
    assert there == [f"{place}/run-unknown"]
    assert call > 8


def is_there(url: str) -> bool:
    files, path = fsspec.core.url_to_fs(url)
    return bool(files.exists(path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_64_faults_of_a_save_in_the_distributed_format_leave_a_whole_step(kind: str) -> None:
    def save_number(place: str, step: int, number: float) -> None:
        def body(engine: Engine) -> None:
            engine.set_weights({name: torch.full_like(w, number) for name, w in engine.full_weights().items()})
            save_state(engine, place, step, {}, format="dcp")

        run_engines(PLAN, Split, body)

    def load_number(place: str) -> SimpleNamespace:
        def body(engine: Engine) -> SimpleNamespace:
            step = load_newest(engine, place, format="dcp")
            (number,) = {one for weight in engine.full_weights().values() for one in weight.unique().tolist()}
            return SimpleNamespace(step=step, number=number)

        return run_engines(PLAN, Split, body)[0]

    require_whole_steps(kind, 16, 2, save_number, load_number)


@contextmanager
def s3() -> Iterator[str]:
    """Run a server of S3 within a context; yield the URL of a bucket of it."""
    server = pytest.importorskip("moto.server", reason="needs pip install 'moto[server]' s3fs")
    pytest.importorskip("s3fs", reason="needs pip install s3fs")
    started = server.ThreadedMotoServer("127.0.0.1", port=0)
    started.start()
    host, port = started.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "a", "secret": "b"}
    fsspec.config.conf["s3"] = options
    fsspec.filesystem("s3").mkdir("runs")
    yield "s3://runs"
    fsspec.config.conf.pop("s3")
    started.stop()


@contextmanager
def gs() -> Iterator[str]:
    """Run an emulator of Google's storage within a context; yield the URL of a bucket of it."""
    server = pytest.importorskip("gcp_storage_emulator.server", reason="needs pip install gcp-storage-emulator gcsfs")
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which asks by gRPC, and no emulator answers
        pytest.importorskip("gcsfs", reason="needs pip install gcsfs")
        port = free.getsockname()[1]
    fsspec.config.conf["gs"] = {"endpoint_url": f"http://127.0.0.1:{port}", "token": "anon", "project": "mine"}
    with server.create_server("127.0.0.1", port, in_memory=True, default_bucket="runs"):
        yield "gs://runs"
    fsspec.config.conf.pop("gs")


@pytest.fixture(scope="module", params=[s3, gs], ids=["s3", "gs"])
def cloud(request: pytest.FixtureRequest) -> Iterator[str]:
    with request.param() as url:
        yield url


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.filterwarnings("default")
def test_runs_in_a_cloud_do_what_those_in_memory_do(data_file, cloud, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bucket_folder, "BEAT_S", 0.5)
    for how in HOW:
        check_resumed(data_file, f"{cloud}/{uuid4().hex}", how)
    place = f"{cloud}/{uuid4().hex}"
    other = BucketFolder(place, "1" * 16)
    lock = other.lock()
    with pytest.raises(qs.UsageError, match="another run saves its checkpoints there"):
        fit(job(data_file, place))
    lock.release()
    other.close()
    check_commands(job(data_file, f"{cloud}/{uuid4().hex}", every=4), tmp_path, capsys)
    check_measured(data_file, f"{cloud}/{uuid4().hex}")
