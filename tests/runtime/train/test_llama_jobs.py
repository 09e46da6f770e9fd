"""A Llama that learns this project's text by a job file: one curve on every mesh, and where a run goes on elsewhere.

one process   step 1 ─────────────────────────────▶ last      losses, and perplexity of validations
pp=2,tp=2     step 1 ──────▶ half, a checkpoint               equal to 1e-10 in float64
dp=2,pp=2                    half + 1 ────────────▶ last      in mid-epoch, to the sample
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from quintsched.runtime.launch.worker import main
from quintsched.tokens import TokenWriter, documents_of, find_tokenizer

from ...helpers.commands import run

ROOT = Path(__file__).parents[3]
TEXTS = {"docs": [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], "code": sorted(ROOT.glob("runtime/*/*.py"))}

JOB = """
model:
  name: gpt
  options:
    {{norm: rmsnorm, positions: rope, activation: swiglu, biases: false, tied: true,
      hidden: {hidden}, depth: {depth}, heads: 8, kv_heads: 4, ffn: {ffn}}}
data: {data}
parallel: {{mesh: "dp=1", schedule: 1f1b, microbatches: 4}}
train:
  max_steps: {steps}
  batch_size: 8
  evaluate_every: {half}
  optimizer: {{name: adamw, lr: {rate}, betas: [0.9, 0.95], weight_decay: 0.1, decay: matrices}}
  lr_schedule: {{name: constant, warmup_steps: 10}}
  clip: 1.0
runtime: {{transport: local, precision: float64}}
checkpoint: {{every: {half}, keep: 9}}
log: {{every: 1}}
"""

SHARDS = """
  name: tokens
  path: tokens
  options:
    sequence: 128
    {options}
    samples: {samples}
    validation: 0.004
    mixture: [{{path: docs, weight: 1}}, {{path: code, weight: 3}}]
"""

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


@dataclass(frozen=True)
class Size:
    """Sizes of a model, and the length of its training; an epoch ends within the second half.

    At a larger rate than 3e-4, 60 steps of the larger model make 1e-8 of a rounding: two numbers of microbatches differ
    by as much in one process.
    """

    hidden: int
    depth: int
    ffn: int
    steps: int
    rate: str

    @property
    def half(self) -> int:
        return self.steps // 2

    def job(self, data: str) -> str:
        sizes = {"hidden": self.hidden, "depth": self.depth, "ffn": self.ffn, "rate": self.rate}
        return JOB.format(data=data, steps=self.steps, half=self.half, **sizes)


ONE_MILLION = Size(128, 4, 512, steps=20, rate="1e-3")
TEN_MILLION = Size(320, 8, 1000, steps=60, rate="3e-4")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_shards() -> None:
    tokenizer = find_tokenizer("bytes")
    for name, files in TEXTS.items():
        with TokenWriter(Path("tokens", name), vocabulary=256, tokenizer="bytes", end=0) as writer:
            for ids in tokenizer.encoded(documents_of(files)):
                writer.add(ids)


def write_stream() -> None:
    Path("stream.py").write_text(STREAM)
    Path("text").write_bytes(b"\n\n".join(documents_of([*TEXTS["docs"], *TEXTS["code"]])))


def in_this_process(*arguments: str) -> None:
    assert main(["--config", "job.yaml", *arguments]) == 0


def in_processes(*arguments: str) -> None:
    gloo = ("--set", "runtime.transport=gloo")
    code, _, said = run(sys.executable, "-m", "quintsched", "run", "job.yaml", *gloo, *arguments, timeout_s=1800)
    assert code == 0, said


Run = Callable[..., None]
Curve = tuple[dict[int, float], dict[int, float]]
"""The loss of each step, and the perplexity of each validation, by step."""


def curve(runs: Run, name: str, *settings: str, resumes: bool = False) -> Curve:
    """Run the job with settings."""
    given = [part for one in (f"log.path={name}.jsonl", *settings) for part in ("--set", one)]
    runs(*given, *(["--resume"] if resumes else []))
    records = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["event"] == "step"}
    key = "validation_perplexity"
    return losses, {record["step"]: record[key] for record in records if key in record}


def require_one_curve(runs: Run, size: Size, data: str, mesh: str, other: str, *, steps: int | None = None) -> None:
    """Require the losses and perplexities of one process on a mesh, and on another one that goes on from its half.

    The first mesh trains for `steps`; None: as long as one process.
    """
    trained = steps or size.steps
    Path("job.yaml").write_text(size.job(data))
    losses, perplexities = curve(runs, "alone")
    assert list(losses) == list(range(1, size.steps + 1))
    assert losses[size.steps] < losses[1] - 1
    assert {size.half, size.steps} <= set(perplexities)
    saved = f"checkpoint.dir={Path('saved').resolve()}"
    first = curve(runs, "first", f"parallel.mesh={mesh}", saved, f"train.max_steps={trained}")
    assert len(first[0]) == trained
    for path in list(Path("saved").glob("step-*")):
        if int(path.name[5:]) > size.half:
            shutil.rmtree(path)
    second = curve(runs, "second", f"parallel.mesh={other}", saved, resumes=True)
    assert list(second[0]) == list(range(size.half + 1, size.steps + 1))
    for found, found_perplexities in (first, second):
        assert found == pytest.approx({step: losses[step] for step in found}, abs=1e-10, rel=0)
        assert found_perplexities == pytest.approx({step: perplexities[step] for step in found_perplexities}, rel=1e-10)


def shards(size: Size, options: str) -> str:
    return SHARDS.format(samples=6 * size.steps, options=options)


MASKED, PADDED = "mask_documents: true", "pack: false"


def test_a_llama_of_a_million_weights_has_one_curve() -> None:
    write_shards()
    data, half = shards(ONE_MILLION, MASKED), ONE_MILLION.half
    require_one_curve(in_this_process, ONE_MILLION, data, "pp=2,tp=2", "dp=2,pp=2", steps=half)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["masked", "padded", "streamed"])
def test_a_llama_of_ten_million_weights_has_one_curve(case: str) -> None:
    size = TEN_MILLION if case == "masked" else replace(TEN_MILLION, steps=20)
    if case == "streamed":
        pytest.importorskip("torchdata")
        write_stream()
        require_one_curve(in_processes, size, '{name: "stream.py:load"}', "pp=2,tp=2", "dp=2,tp=2")
    else:
        write_shards()
        require_one_curve(
            in_processes, size, shards(size, MASKED if case == "masked" else PADDED), "pp=2,tp=2", "dp=2,pp=2"
        )
