"""Readers of files under test, each with good files to begin with."""

import atexit
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml

import quintsched as qs
from quintsched import torch_csv
from quintsched.collectives import collective_json
from quintsched.collectives.expand_collective import spelled
from quintsched.files.strictjson import parse_strict
from quintsched.formats import plan_columns, plan_json
from quintsched.runtime.parallel.tensor.parameter_shards import TpShard
from quintsched.runtime.saving.checkpoints import manifest as manifests
from quintsched.runtime.saving.index_ranges_in_full_tensors import StateLayout, TensorPlacement
from quintsched.runtime.saving.saved_state import SavedState
from quintsched.runtime.saving.write_tensors import WrittenFile, entries_of, write_tensors
from quintsched.runtime.settings.job_file import load_job
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from quintsched.stalls.stall_report import StallReport
from quintsched.strategies.descriptions.flag_rows import read_row
from quintsched.strategies.descriptions.presets_and_files import model_names
from quintsched.strategies.tuning.search_certificate import load_certificate, make_certificate
from quintsched.trace.trace_json import RankTrace, digest_of, load_ranks

from ..strategies.tuning.problems import groups, problem
from . import in_use

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Reader:
    """A reader of bytes, and files that it takes."""

    seeds: Callable[[], Sequence[bytes]]
    read: Callable[[bytes], object]
    stays_json: bool = False
    """Whether only values of its files are changed, which so come to be used."""


@cache
def folder() -> Path:
    """Return a folder for the files of one process, in memory where there is such."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def by_path(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    """Return a reader of bytes that writes them to a file first."""

    def read_bytes(data: bytes) -> object:
        path = folder() / name
        path.write_bytes(data)
        return read(path)

    return read_bytes


@cache
def plans() -> tuple[qs.Plan, ...]:
    """Return plans of all kinds, small ones."""
    return (
        qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=4, zero=2, tied={"embedding": (0, 1)}),
        qs.compile("zbv", mesh="pp=2", microbatches=3),
        qs.compile("dualpipe", mesh="pp=2", microbatches=4, recompute=1),
        qs.compile("gpipe", mesh="dp=4,pp=2", microbatches=2, communication="ring"),
        qs.compile("1f1b", mesh="pp=3", microbatches=3, skip={"h": (0, 2)}, stages=(1, 2, 1), losses=(1, 2)),
        qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=3, zero_every=2),
    )


def read_plan(data: bytes) -> object:
    """Read a plan, which comes back as it was, and check it."""
    plan = plan_json.loads(data)
    assert plan_json.loads(plan_json.dumps(plan)) == plan
    return qs.check(plan)


def read_columns(data: bytes) -> object:
    """Read a plan of columns, which are compressed here, and check what was read."""
    packer = zlib.compressobj(1, wbits=31)
    return qs.check(plan_columns.unpack(packer.compress(data) + packer.flush()))


def csv_seeds() -> list[bytes]:
    texts = [torch_csv.dumps(plan, compute_only=alone) for plan in (plans()[1], plans()[5]) for alone in (False, True)]
    files = sorted((ROOT / "tests" / "data" / "torch_csv").glob("*.csv"), key=lambda path: path.stat().st_size)
    return [*(text.encode() for text in texts), *(path.read_bytes() for path in files[:6])]


def read_csv(data: bytes) -> object:
    """Read as the command does."""
    try:
        return torch_csv.loads(data.decode())
    except UnicodeDecodeError as error:
        raise qs.InputError(f"not UTF-8 text: byte {error.start} cannot be read") from error


def job_seeds() -> list[bytes]:
    files = [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.yaml"))]
    more = b"""
parallel: {mesh: "dp=2,tp=2", schedule: 1f1b, microbatches: 4, rules: {"*.q": {cut: column, parts: [4, 2, 2]}}, zero: 2}
train: {epochs: 2, batch_size: 32, optimizer: {name: adamw, lr: 3e-3, betas: [0.9, 0.95]}, clip: 1.0, seed: 3}
model: &m {name: gpt, options: {hidden: 64, depth: 4}}
data: {name: text, options: {sequence: 128, max_bytes: null}}
log: {sinks: [tensorboard, {name: wandb, options: {project: mine}}]}
"""
    return [*files, more]


def cost_seeds() -> list[bytes]:
    files = [path.read_bytes() for path in sorted((ROOT / "examples").glob("costs*.json"))]
    more = {
        "unit": "ms", "forward": [1.0, 2.0], "backward_input": 18.086, "p2p": {"latency": 0.1, "per_unit": 0.2},
        "activation": {"stages": [1.0, 2.0], "microbatches": [0.5, 1.5]}, "activation_after_input": None,
    }  # fmt: skip
    return [*files, json.dumps(more).encode()]


@cache
def traced() -> qs.Plan:
    return qs.compile("1f1b", mesh="pp=2", microbatches=2)


def trace_seeds() -> list[bytes]:
    plan = traced()
    for rank in range(2):
        start = np.arange(len(plan.programs[rank]), dtype=float)[None].repeat(2, 0)
        RankTrace(digest_of(plan), rank, rank, (2, 3), start, start + 0.5, start * 0).save_rank(folder())
    return [(folder() / "rank0.json").read_bytes()]


def read_trace(data: bytes) -> object:
    """Read a directory whose first file has these bytes; the other one is good."""
    if not (folder() / "rank1.json").exists():
        trace_seeds()
    (folder() / "rank0.json").write_bytes(data)
    return load_ranks(folder(), traced())


def manifest_seeds() -> list[bytes]:
    files = [WrittenFile(name=f"rank-{r:05d}.safetensors", bytes=4096, sha256=f"{r:064x}") for r in range(4)]
    progress = {"epoch": 1, "history": [{"loss": 0.5, "event": "epoch"}], "totals": {"loss": None}}
    mesh, head = qs.Mesh(dp=2, pp=2), {"format": "quintsched.dcp", "version": 2, "run": "0" * 16, "step": 3}
    native = manifests.make_manifest("0" * 16, 3, "1" * 64, mesh, files, progress, {"train.seed": 0})
    return [native.to_json(), manifests.DcpManifest(**head, replicas=2, files=files, progress=progress).to_json()]


def read_manifest(data: bytes) -> object:
    """Read as it is, and as one whose checksum is right."""
    found: list[object] = []
    line, _, rest = data.partition(b",")
    for content in (data, manifests.seal(b"{" + rest) if line.startswith(b'{\n "sha256"') else b""):
        try:
            manifest = manifests.parse_manifest(content, 3)
            assert manifest.step == 3
            if isinstance(manifest, manifests.Manifest):
                ranks = 1 if manifest.mesh == "one rank" else qs.Mesh.parse(manifest.mesh).size
                assert [file.name for file in manifest.files] == [manifests.file_name(rank) for rank in range(ranks)]
            found.append(manifest)
        except qs.InputError as error:
            found.append(error)
    for one in found:
        if isinstance(one, qs.InputError):
            raise one
    return found


def collective_seeds() -> list[bytes]:
    programs = [spelled("all_reduce", "ring", 4, 4), spelled("all_reduce", "tree", 5, 4)]
    return [collective_json.dumps(program).encode() for program in programs]


def stall_seeds() -> list[bytes]:
    awaits = [BlockingCall("receive", 2), BlockingCall("nothing"), BlockingCall("collective", ranks=(0, 1)), None]
    fates = [None, Fate("signal", 9, "", 0.2), Fate("error", 1, "ValueError: x", 0.1), None]
    states = [
        RankState(rank, "a", rank, "step", 1, "train", 2, 3.0, 0.1, fates[rank], awaits[rank], 1) for rank in range(4)
    ]
    return [find_culprit(plans()[5], some).to_json().encode() for some in (states, states[:1] + states[3:])]


@cache
def certificate_seeds() -> list[bytes]:
    found, path = [], folder() / "certificate.json"
    for given in [given for given in map(problem, range(24)) if groups(given)][:3]:
        sizes, fixed = (given.gpus, given.batch, given.seq), given.choices.model_dump()
        make_certificate(qs.tune(given.model, given.hardware, *sizes, fixed=fixed)).save(path)
        found.append(path.read_bytes())
    return found


def layout_seeds() -> list[bytes]:
    cut = TensorPlacement((48, 16), (24, 16), (0, 0), TpShard(0, 3, 1, 2), (4, 90))
    parts = TensorPlacement((8, 16), (8, 4), (0, 0), TpShard(1, (2, 1, 1), 0, 4))
    layout = StateLayout(
        (1, 2), {"model.1.qkv.weight": cut, "model.2.w": parts}, {"optimizer.1.a.b": cut},
        {"model.2.w": "bfloat16"}, {"1.qkv.weight": "layers.0.qkv.weight"}, [["0.tokens.weight", "3.head.weight"]],
    )  # fmt: skip
    return [layout.to_text().encode()]


def shard_seeds() -> list[bytes]:
    state = {"model.0.weight": torch.ones(2, 3), "model.0.bias": torch.ones(3, dtype=torch.bfloat16)}
    entries, metadata = entries_of(state), {"quintsched.layout": StateLayout().to_text()}
    path = folder() / "seed.safetensors"
    path.unlink(missing_ok=True)
    write_tensors(path, entries, (state[entry.name] for entry in entries), metadata)
    return [path.read_bytes()]


def model_seeds() -> list[bytes]:
    return [qs.find_model(name).model_dump_json(exclude_defaults=True).encode() for name in model_names()[::4]]


def read_rows(data: bytes) -> object:
    """Read a row of a table of strategies."""
    given = parse_strict(data)
    return read_row(given) if isinstance(given, dict) else None


def row_seeds() -> list[bytes]:
    row = {
        "model": "gpt3-175b", "hardware": "a100", "gpus": 64, "dp": 2, "tp": 8, "pp": 4, "microbatch": 1, "batch": 64,
        "seq": 2048, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "selective", "zero": 1, "dtype": "bf16",
    }  # fmt: skip
    return [json.dumps(row).encode(), json.dumps(row | {"recompute": [1, 2, 0, 0], "stages": [24] * 4}).encode()]


READERS: dict[str, Reader] = {
    "plan": Reader(lambda: [plan.to_json().encode() for plan in plans()], read_plan),
    "plan columns": Reader(lambda: [zlib.decompress(plan_columns.pack(plan), 31) for plan in plans()], read_columns),
    "csv": Reader(csv_seeds, read_csv),
    "job": Reader(job_seeds, by_path(load_job, "job.yaml")),
    "costs": Reader(cost_seeds, by_path(qs.Costs.load, "costs.json")),
    "trace": Reader(trace_seeds, read_trace),
    "manifest": Reader(manifest_seeds, read_manifest),
    "stall": Reader(stall_seeds, lambda data: StallReport.from_json(data).words()),
    "certificate": Reader(certificate_seeds, by_path(load_certificate, "certificate.json")),
    "layout": Reader(layout_seeds, lambda data: StateLayout.from_text(data.decode(errors="replace"))),
    "shard": Reader(shard_seeds, by_path(lambda path: SavedState.of_files([path]), "shard.safetensors")),
    "model": Reader(model_seeds, by_path(qs.find_model, "model.json")),
    "hardware": Reader(in_use.hardware, by_path(qs.find_hardware, "hardware.json")),
    "model in YAML": Reader(
        lambda: [yaml.safe_dump(json.loads(seed)).encode() for seed in model_seeds()],
        by_path(qs.find_model, "model.yaml"),
    ),
    "row": Reader(row_seeds, read_rows),
    "collective": Reader(collective_seeds, collective_json.loads),
    "model in use": Reader(in_use.models, by_path(in_use.predict_with("model"), "model.json"), stays_json=True),
    "hardware in use": Reader(in_use.hardware, by_path(in_use.predict_with("hardware"), "h.json"), stays_json=True),
    "profile in use": Reader(in_use.profiles, by_path(in_use.predict_measured, "profile.json"), stays_json=True),
    "trace in use": Reader(in_use.traces, by_path(in_use.predict_traced, "kineto.json"), stays_json=True),
    "certificate in use": Reader(certificate_seeds, by_path(in_use.check_read, "certificate.json"), stays_json=True),
    "profile": Reader(in_use.profiles, by_path(in_use.predict_measured, "profile.json")),
}
