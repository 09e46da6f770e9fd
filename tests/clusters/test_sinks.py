"""Figures of a run in Weights & Biases (offline), MLflow and trackio: those of the run's own log."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintsched.runtime.launch.worker import main

from .engine_runs import JOB, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.filterwarnings("default")]  # theirs
SINKS = ROOT / "examples" / "sinks.py"
Losses = dict[int, float]


def train(folder: Path, sink: str | Path, **options: str) -> Losses:
    """Train with a sink, all ranks in this process; return the loss of each step in the log."""
    log = folder / "log.jsonl"
    settings = ["runtime.transport=local", "train.epochs=1", "checkpoint={}", f"log.path={log}"]
    sinks = json.dumps([{"name": str(sink), "options": options}])
    words = [word for setting in [*settings, f"log.sinks={sinks}"] for word in ("--set", setting)]
    assert main(["--config", str(JOB), *words]) == 0
    records = map(json.loads, log.read_text("utf-8").splitlines())
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def approximately(losses: Losses) -> Any:
    return pytest.approx(losses, rel=1e-6)


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: blocks of 32 KiB; each piece has checksum, length and kind before it."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<4xHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    losses = train(tmp_path, "wandb", project="mine", mode="offline", dir=str(tmp_path))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found: Losses = {}
    for data in wandb_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "train/loss" in items:
            found[int(items["_step"])] = json.loads(items["train/loss"])
    assert found == approximately(losses)


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs pip install mlflow-skinny sqlalchemy alembic")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    losses = train(tmp_path, f"{SINKS}:MLflow", uri=uri)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("quintsched").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {metric.step: metric.value for metric in history} == approximately(losses)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs pip install trackio")
    losses = train(tmp_path, f"{SINKS}:Trackio", project="mine", name="one")
    (file,) = (tmp_path / "trackio").glob("mine*.db")
    rows = sqlite3.connect(file).execute("select step, metrics from metrics where run_name = 'one'").fetchall()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    assert {step: row["train/loss"] for step, row in found if "train/loss" in row} == approximately(losses)
