"""A Llama that learns this project's text by a job file: one curve on every mesh, and where a run goes on elsewhere.

one process   step 1 ─────────────────────────────▶ last      losses, and perplexity of validations
pp=2,tp=2     step 1 ──────▶ half, a checkpoint               equal to 1e-10 in float64
dp=2,pp=2                    half + 1 ────────────▶ last      in mid-epoch, to the sample
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from quintsched.tokens import TokenWriter, documents_of, find_tokenizer

from ...helpers.commands import run

ROOT = Path(__file__).parents[3]
TEXTS = {"docs": [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], "code": sorted(ROOT.glob("runtime/*/*.py"))}

JOB = """
model:
  name: gpt
  options:
    {{norm: rmsnorm, positions: rope, activation: swiglu, biases: false, tied: true,
      hidden: 320, depth: 8, heads: 8, kv_heads: 4, ffn: 1000}}
data: {data}
parallel: {{mesh: "dp=1", schedule: 1f1b, microbatches: 4}}
train:
  max_steps: {steps}
  batch_size: 8
  evaluate_every: {half}
  optimizer: {{name: adamw, lr: 3e-4, betas: [0.9, 0.95], weight_decay: 0.1, decay: matrices}}
  lr_schedule: {{name: constant, warmup_steps: 10}}
  clip: 1.0
runtime: {{transport: local, precision: float64}}
checkpoint: {{every: {half}, keep: 9}}
log: {{every: 1}}
"""
"""An epoch ends within the second half. At a larger rate than 3e-4, 60 steps make 1e-8 of a rounding: two numbers of
microbatches differ by as much in one process.
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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_shards() -> None:
    tokenizer = find_tokenizer("bytes")
    for name, files in TEXTS.items():
        with TokenWriter(Path("tokens", name), vocabulary=256, tokenizer="bytes", end=0) as writer:
            for ids in tokenizer.encoded(documents_of(files)):
                writer.add(ids)


def run_job(*arguments: str) -> None:
    gloo = ("--set", "runtime.transport=gloo")
    code, _, said = run(sys.executable, "-m", "quintsched", "run", "job.yaml", *gloo, *arguments, timeout_s=1800)
    assert code == 0, said


Curve = tuple[dict[int, float], dict[int, float]]
"""The loss of each step, and the perplexity of each validation, by step."""


def curve(name: str, *settings: str, resumes: bool = False) -> Curve:
    """Run the job with settings."""
    given = [part for one in (f"log.path={name}.jsonl", *settings) for part in ("--set", one)]
    run_job(*given, *(["--resume"] if resumes else []))
    records = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["event"] == "step"}
    key = "validation_perplexity"
    return losses, {record["step"]: record[key] for record in records if key in record}


def require_one_curve(steps: int, data: str, other: str) -> None:
    """Require the curve of one process on pp=2,tp=2, and on another mesh that goes on from its half."""
    half = steps // 2
    Path("job.yaml").write_text(JOB.format(data=data, steps=steps, half=half))
    losses, perplexities = curve("alone")
    assert list(losses) == list(range(1, steps + 1))
    assert losses[steps] < losses[1] - 1
    assert {half, steps} <= set(perplexities)
    saved = f"checkpoint.dir={Path('saved').resolve()}"
    first = curve("first", "parallel.mesh=pp=2,tp=2", saved)
    assert len(first[0]) == steps
    for path in list(Path("saved").glob("step-*")):
        if int(path.name[5:]) > half:
            shutil.rmtree(path)
    second = curve("second", f"parallel.mesh={other}", saved, resumes=True)
    assert list(second[0]) == list(range(half + 1, steps + 1))
    for found, found_perplexities in (first, second):
        assert found == pytest.approx({step: losses[step] for step in found}, abs=1e-10, rel=0)
        assert found_perplexities == pytest.approx({step: perplexities[step] for step in found_perplexities}, rel=1e-10)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("steps", "options"), [(60, "mask_documents: true"), (20, "pack: false")], ids=["masked", "padded"]
)
def test_a_llama_of_ten_million_weights_has_one_curve(steps: int, options: str) -> None:
    write_shards()
    require_one_curve(steps, SHARDS.format(samples=6 * steps, options=options), "dp=2,pp=2")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_a_llama_that_reads_a_stream_has_one_curve() -> None:
    pytest.importorskip("torchdata")
    Path("stream.py").write_text(STREAM)
    Path("text").write_bytes(b"\n\n".join(documents_of([*TEXTS["docs"], *TEXTS["code"]])))
    require_one_curve(20, '{name: "stream.py:load"}', "dp=2,tp=2")
