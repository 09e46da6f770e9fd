"""Files that `tune` writes run: the plan and the job file agree, and train like one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintsched.runtime.launch.prediction_flags import row_of
from quintsched.runtime.launch.run_arguments import RunRequest
from quintsched.runtime.launch.worker import main, prepare
from quintsched.strategies.descriptions.model import Experts, Images, Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.tuning.export.emit import emit

GPT = Model(layers=4, hidden=32, heads=4, vocab=256, seq=16, dropout=False)
MOE = GPT.model_copy(update={"experts": Experts(count=4, top_k=2, ffn=128, every=2)})
PATCHES = Images(size=8, patch=2, channels=1, classes=10)
VIT = Model(layers=4, hidden=32, heads=4, vocab=0, images=PATCHES, tied=False, causal=False, dropout=False, seq=17)
CASES = {
    "gpt interleaved": (GPT, {"pp": 2, "tp": 2, "chunks": 2, "schedule": "interleaved-1f1b", "recompute": "full"}),
    "moe-gpt": (MOE, {"ep": 2, "pp": 2, "schedule": "zb-h1"}),
    "vit": (VIT, {"tp": 2, "dp": 2, "sequence_parallel": False}),
}


def losses(folder: Path, *files: str, **settings: Any) -> list[float]:
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    given = {"runtime.transport": "local", "runtime.precision": "float64", "log.path": str(log), "log.every": 1}
    chosen = [f"--set={name}={value}" for name, value in {**given, **settings}.items()]
    assert main([*files, *chosen]) == 0
    return [step["loss"] for line in log.read_text().splitlines() if "loss" in (step := json.loads(line))]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_emitted_job_learns_what_one_process_learns(name: str, tmp_path: Path) -> None:
    model, given = CASES[name]
    strategy = Strategy(gpus=4, batch=16, seq=model.seq, microbatch=2, **given)
    written = emit(model, strategy, tmp_path)
    job, plan, _ = prepare(RunRequest(plan=str(written.files["plan"]), config=str(written.files["job"])), alone=True)
    row = row_of(job, plan)
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert row[axis] == getattr(strategy, axis)
    assert (row["microbatch"], row["zero"], row["batch"]) == (2, strategy.zero, 16)
    small = {} if model.images else {"data.options.max_bytes": 3000}
    files = (str(written.files["plan"]), "--config", str(written.files["job"]))
    alone = emit(model, Strategy(gpus=1, batch=16, seq=model.seq, microbatch=2), tmp_path / "alone")
    one = losses(tmp_path, str(alone.files["plan"]), "--config", str(alone.files["job"]), **small)
    assert losses(tmp_path, *files, **small) == pytest.approx(one, rel=1e-10)
