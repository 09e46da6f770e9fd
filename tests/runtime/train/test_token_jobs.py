"""Jobs on tokens: the losses of one process on a mesh, and on another mesh that goes on in mid-epoch to the sample.

one process   step 1 ─────────────────────────────▶ last      losses of steps and of validations
first mesh    step 1 ──────▶ k, a checkpoint ─────▶ last      equal to 1e-10 in float64
second mesh                      k + 1 ───────────▶ last      equal as well
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quintsched as qs
from quintsched.runtime.data import IGNORED_TARGET, DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.tokens import TokenWriter, documents_of, find_tokenizer

from ...helpers.commands import run
from ...helpers.jobs import LOGGED, Sections, joined, launch, run_job

ROOT = Path(__file__).parents[3]
TEXTS = {"docs": [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], "code": sorted(ROOT.glob("runtime/*/*.py"))}
SMALL: Sections = {
    "model": {"name": "gpt", "options": {"hidden": 16, "depth": 2, "heads": 2, "positions": "rope"}},
    "parallel": {"microbatches": 2},
    "train": {"batch_size": 8, "epochs": 2, "optimizer": {"name": "adamw", "lr": 0.01}},
    "checkpoint": {"every": 3},
}
SIZES = {"hidden": 320, "depth": 8, "heads": 8, "kv_heads": 4, "ffn": 1000}
LLAMA: Sections = {
    "model": {
        "name": "gpt",
        "options": {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "biases": False, "tied": True}
        | SIZES,
    },
    "parallel": {"microbatches": 4},
    "train": {
        "batch_size": 8,
        "optimizer": {"name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "decay": "matrices"},
        "lr_schedule": {"name": "constant", "warmup_steps": 10},
        "clip": 1.0,
    },
    "runtime": {"transport": "gloo", "precision": "float64"},
}
"""At a larger rate than 3e-4, 60 steps make 1e-8 of a rounding: two numbers of microbatches differ by as much in one
process."""
MIXED = {"mixture": [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}], "samples": 36, "sequence": 12}
TEXT = {"mixture": [{"path": "docs", "weight": 1}, {"path": "code", "weight": 3}], "sequence": 128, "validation": 0.004}
MASKED = MIXED | {"mask_documents": True}
STREAM = """
from pathlib import Path
from quintsched.runtime.data import DataSpec, Loaders, PackedStream
from torchdata.stateful_dataloader import StatefulDataLoader

def load(replica, num_replicas):
    paragraphs = Path("text").read_text().split("\\n\\n")
    def stream(texts):
        packed = PackedStream(texts, sequence=128, batch_size=8, replica=replica, num_replicas=num_replicas)
        return StatefulDataLoader(packed, batch_size=None, num_workers=1)
    spec = DataSpec(input_shape=(128,), num_classes=256)
    return Loaders(stream(paragraphs[60:]), validation=list(stream(paragraphs[:60])), batches=15, spec=spec)
"""
"""A stream of paragraphs, packed by a worker in a process of its own."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, numbers = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for name in "ab":
        with TokenWriter(root / name, vocabulary=32, tokenizer="t", end=0, shard_tokens=250) as writer:
            for _ in range(16):
                writer.add(numbers.integers(1, 32, numbers.integers(1, 40)))
    return root


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def small(tokens: Path, options: dict[str, Any], mesh: str = "dp=1", **more: Any) -> dict[str, dict[str, Any]]:
    data = {"name": "tokens", "path": str(tokens), "options": options}
    return joined(SMALL, {"data": data, "parallel": {"mesh": mesh} | more})


def llama(steps: int, data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a job that is saved and evaluated at its half."""
    train, checkpoint = {"max_steps": steps, "evaluate_every": steps // 2}, {"every": steps // 2}
    return joined(LLAMA, {"data": data, "train": train, "checkpoint": checkpoint})


def losses(job: Sections, mesh: str, *arguments: str, saves: bool = False) -> dict[Any, float]:
    """Run a job; return the loss of each step by its number, and of each validation by its step."""
    more: Sections = {"parallel": {"mesh": mesh}, "checkpoint": {"dir": "saved", "keep": 99} if saves else {}}
    if "runtime" not in job:
        records = run_job(job, more, arguments=arguments)
    else:
        Path("job.yaml").write_text(json.dumps(joined(LOGGED, job, more)))
        Path("log.jsonl").unlink(missing_ok=True)
        code, _, said = run(sys.executable, "-m", "quintsched", "run", "job.yaml", *arguments, timeout_s=1800)
        assert code == 0, said
        records = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    steps = {record["step"]: record["loss"] for record in records if record["event"] == "step"}
    return steps | {f"at {r['step']}": r["validation_loss"] for r in records if r.get("validation_loss") is not None}


def require_one_curve(job: Sections, first: str, second: str) -> None:
    alone = losses(job, "dp=1")
    assert losses(job, first, saves=True) == pytest.approx(alone, abs=1e-10)
    begun, *later = sorted(Path("saved").glob("step-*"))
    for path in later:
        shutil.rmtree(path)
    found = losses(job, second, "--resume", saves=True)
    assert min(step for step in found if isinstance(step, int)) == int(begun.name[5:]) + 1
    assert max(alone, key=str) in found
    assert found == pytest.approx({step: alone[step] for step in found}, abs=1e-10)


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        (MIXED | {"prefetch": 0}, "dp=2", "pp=2"),
        (MASKED, "pp=2,tp=2", "dp=2"),
        (MIXED | {"pack": False, "validation": "b"}, "dp=2,tp=2", "pp=2"),
    ],
    ids=["packed", "masked", "padded"],
)
def test_every_mesh_learns_what_one_process_learns(options, first, second, tokens):
    require_one_curve(small(tokens, options), first, second)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("case", "steps"), [("masked", 60), ("padded", 20), ("streamed", 20)])
def test_a_llama_of_ten_million_weights_has_one_curve(case: str, steps: int) -> None:
    for name, files in TEXTS.items():
        with TokenWriter(Path("tokens", name), vocabulary=256, tokenizer="bytes", end=0) as writer:
            for ids in find_tokenizer("bytes").encoded(documents_of(files)):
                writer.add(ids)
    options = TEXT | {"samples": 6 * steps} | ({"mask_documents": True} if case == "masked" else {"pack": False})
    data = {"name": "tokens", "path": "tokens", "options": options}
    if case == "streamed":
        pytest.importorskip("torchdata")
        Path("stream.py").write_text(STREAM)
        Path("text").write_bytes(b"\n\n".join(documents_of([*TEXTS["docs"], *TEXTS["code"]])))
        data = {"name": "stream.py:load"}
    require_one_curve(llama(steps, data), "pp=2,tp=2", "dp=2,tp=2" if case == "streamed" else "dp=2,pp=2")


def test_other_tokens_are_no_run_to_go_on_with(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"sequence": 12, "samples": 24}
    losses(small(tokens / "a", options), "dp=1", saves=True)
    other = joined(small(tokens / "b", options), {"checkpoint": {"dir": "saved", "keep": 99}})
    assert launch(other, arguments=("--resume",)) == 3
    assert "data.training_digest" in capsys.readouterr().err


def test_masked_documents_have_the_losses_that_they_have_alone() -> None:
    """With rotary positions, attention depends on distances alone: a packed document is as it is by itself."""
    lengths, options = [5, 1, 7, 3], GPTOptions(hidden=16, depth=2, heads=2, kv_heads=1, positions="rope")
    data = DataSpec(input_shape=(sum(lengths),), num_classes=32)
    blocks = [block().double() for block in gpt(data, options)]
    engine = Engine(qs.compile("1f1b", mesh="dp=1", microbatches=1), blocks, cross_entropy_sum, torch.optim.SGD)
    documents = [torch.randint(0, 32, (length,)) for length in lengths]
    targets = torch.cat([torch.cat([ids[1:], torch.tensor([IGNORED_TARGET])]) for ids in documents])[None]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    packed = engine.evaluate(torch.cat(documents)[None], targets, document_ids=numbers)
    model = torch.nn.Sequential(*blocks)
    alone = [cross_entropy_sum(model(ids[None, :-1]), ids[None, 1:])[0] for ids in documents if len(ids) > 1]
    assert packed.weight == sum(lengths) - len(lengths)
    assert (packed.loss * packed.weight).item() == pytest.approx(sum(alone).item(), abs=1e-10)


@pytest.mark.parametrize(
    ("mesh", "more", "words"),
    [
        ("cp=2", {}, "only in whole sequences, but cp cuts sequences; set data.options.mask_documents to false"),
        ("pp=2", {"schedule": "seq-1f1b", "slices": 2}, "but sequences come in slices; set"),
    ],
)
def test_documents_are_kept_apart_in_whole_sequences(mesh, more, words, tokens, capsys):
    assert launch(small(tokens, MASKED, mesh, **more)) == 3
    assert words in capsys.readouterr().err
