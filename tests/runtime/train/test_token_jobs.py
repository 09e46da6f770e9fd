"""Jobs on token shards: the numbers of one process on every mesh, resumed in mid-epoch on another one to the sample."""

import shutil
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
from quintsched.tokens import TokenWriter

from ...helpers.jobs import launch, run_job

SEQUENCE = 12
MIXED = {"mixture": [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}], "samples": 36, "sequence": SEQUENCE}
CASES: dict[str, dict[str, Any]] = {
    "packed": {**MIXED, "prefetch": 0},
    "masked": {**MIXED, "mask_documents": True},
    "padded": {**MIXED, "pack": False, "validation": "b"},
}


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


def job(tokens: Path, options: dict[str, Any], mesh: str) -> dict[str, Any]:
    return {
        "model": {"name": "gpt", "options": {"hidden": 16, "depth": 2, "heads": 2, "positions": "rope"}},
        "data": {"name": "tokens", "path": str(tokens), "options": options},
        "parallel": {"mesh": mesh, "microbatches": 2},
        "train": {"batch_size": 8, "epochs": 2, "optimizer": {"name": "adamw", "lr": 0.01}},
    }


def settings_of(settings: tuple[str, ...], *, resume: bool = False) -> tuple[str, ...]:
    return (*(part for setting in settings for part in ("--set", setting)), *(["--resume"] if resume else []))


def losses(tokens: Path, options: dict[str, Any], mesh: str, *settings: str, resume: bool = False) -> Any:
    """Run a job; return the loss of each step by its number, and of each validation by its epoch."""
    records = run_job(job(tokens, options, mesh), arguments=settings_of(settings, resume=resume))
    steps = {record["step"]: record["loss"] for record in records if record["event"] == "step"}
    return steps | {f"epoch {r['epoch']}": r["validation_loss"] for r in records if r["event"] == "epoch"}


@pytest.mark.parametrize(("case", "mesh"), [("packed", "dp=2"), ("masked", "pp=2,tp=2"), ("padded", "dp=2,tp=2")])
def test_every_mesh_learns_what_one_process_learns(case: str, mesh: str, tokens: Path) -> None:
    alone = losses(tokens, CASES[case], "dp=1")
    assert len(alone) == 12
    assert losses(tokens, CASES[case], mesh) == pytest.approx(alone, abs=1e-10)


@pytest.mark.parametrize("case", ["packed", "masked"])
def test_a_run_goes_on_in_mid_epoch_on_another_mesh(case: str, tokens: Path) -> None:
    expected = losses(tokens, CASES[case], "dp=1")
    checkpoint = ("checkpoint.dir=saved", "checkpoint.every=3", "checkpoint.keep=9")
    losses(tokens, CASES[case], "dp=2", *checkpoint)
    steps = sorted(path for path in Path("saved").iterdir() if path.name.startswith("step-"))
    for later in steps[1:]:
        shutil.rmtree(later)
    found = losses(tokens, CASES[case], "pp=2", *checkpoint, resume=True)
    assert min(step for step in found if isinstance(step, int)) == 4
    assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-10)


def test_other_tokens_are_no_run_to_go_on_with(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = ("checkpoint.dir=saved", "checkpoint.every=3")
    options = {"sequence": SEQUENCE, "samples": 24}
    losses(tokens / "a", options, "dp=1", *checkpoint)
    assert launch(job(tokens / "b", options, "dp=1"), arguments=settings_of(checkpoint, resume=True)) == 3
    assert "data.training_digest" in capsys.readouterr().err


def test_masked_documents_have_the_losses_that_they_have_alone() -> None:
    """With rotary positions, attention depends on distances alone: a packed document is as it is by itself."""
    torch.manual_seed(0)
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
    ("mesh", "settings", "words"),
    [
        ("cp=2", (), "only in whole sequences, but cp cuts sequences; set data.options.mask_documents to false"),
        ("pp=2", ("parallel.schedule=seq-1f1b", "parallel.slices=2"), "but sequences come in slices; set"),
    ],
)
def test_documents_are_kept_apart_in_whole_sequences(
    mesh: str, settings: tuple[str, ...], words: str, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(job(tokens, CASES["masked"], mesh), arguments=settings_of(settings)) == 3
    assert words in capsys.readouterr().err
