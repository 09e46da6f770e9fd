"""Jobs of published model sizes: their parameters are those published, their plans those of the search they name."""

import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from quintsched.cli import main as quintsched
from quintsched.runtime.blocks.block_builders import on_meta
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.job_plan import plan_of
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models import build_model, model_sizes, tied_weights
from quintsched.runtime.settings.job_file import load_job
from quintsched.strategies.descriptions.parameters import active, total
from quintsched.tokens import TokenWriter

JOBS = Path(__file__).parents[1] / "examples" / "jobs"
DOCS = JOBS.parents[1] / "docs" / "jobs.md"
PUBLISHED = {  # token ids, and parameters
    "gpt2-124m": (50257, 124_439_808),  # huggingface.co/openai-community/gpt2: 124M
    "gpt2-1.5b": (50257, 1_557_611_200),  # huggingface.co/openai-community/gpt2-xl: 1.5B, without tied copies
    "llama-3.2-1b": (128256, 1_235_814_400),  # huggingface.co/meta-llama/Llama-3.2-1B: 1.23B
    "llama-3.1-8b": (128256, 8_030_261_248),  # huggingface.co/meta-llama/Llama-3.1-8B: 8.03B
    "qwen3-0.6b": (151936, 596_049_920),  # huggingface.co/Qwen/Qwen3-0.6B: 0.6B, 0.44B without the embedding
    "qwen3-8b": (151936, 8_190_735_360),  # huggingface.co/Qwen/Qwen3-8B: 8.2B, 6.95B without embedding and head
    "mixtral-8x7b": (32000, 46_702_792_704),  # huggingface.co/mistralai/Mixtral-8x7B-v0.1: 46.7B
}
ACTIVE = 12.9e9  # of mixtral-8x7b, arXiv:2401.04088, section 2: 13B
TINY = {"hidden": 32, "depth": 2, "heads": 4, "kv_heads": 2, "ffn": 48}
TRAINED = {
    "qwen3-8b": {"model.options.head_size": 6, "parallel.mesh": "dp=2"},
    "mixtral-8x7b": {"model.options.experts": 4, "parallel.mesh": "pp=2,ep=2", "parallel.chunks": 2}
    | {"parallel.stages": [1, 1, 1, 1]},
}
VOCABULARY = 50


def test_every_job_is_known_here() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_jobs_give_sound_plans(name: str) -> None:
    job = load_job(JOBS / f"{name}.yaml")
    assert plan_of(job).check().sound
    assert job.train.max_steps is not None
    assert job.train.lr_schedule.warmup_steps < job.train.max_steps


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_models_have_the_published_parameters(name: str, published: tuple[int, int]) -> None:
    job, (vocabulary, parameters) = load_job(JOBS / f"{name}.yaml"), published
    data = DataSpec(input_shape=(job.data.options["sequence"],), num_classes=vocabulary)
    sizes = model_sizes(job.model, data)
    assert total(sizes) == parameters
    if sizes.experts is not None:
        assert active(sizes) == pytest.approx(ACTIVE, rel=0.01)
    tied = {other for _, *others in tied_weights(job.model).values() for other in others}
    built = [on_meta(block) for block in build_model(job.model, data)]
    weights = {f"{at}.{key}": w for at, block in enumerate(built) for key, w in block.named_parameters()}
    assert sum(weight.numel() for key, weight in weights.items() if key not in tied) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_job_has_the_strategy_of_the_search_it_names(name: str, tmp_path: Path) -> None:
    text = (JOBS / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"^#   quintsched (tune .*) --emit best$", text.replace("\\\n#", ""), re.MULTILINE)
    assert found is not None
    with pytest.raises(SystemExit) as ended:
        quintsched([*shlex.split(found[1]), "--top", "1", "--emit", str(tmp_path)])
    assert not ended.value.code
    emitted, job = yaml.safe_load((tmp_path / "job.yaml").read_text()), yaml.safe_load(text)
    assert job["parallel"] == emitted["parallel"]
    chosen = load_job(JOBS / f"{name}.yaml").model.options, load_job(tmp_path / "job.yaml").model.options
    other = {key: value for key, value in chosen[1].items() if chosen[0].get(key, value) != value}
    assert other in ({}, {"activation": "gelu"})  # descriptions have one gelu; GPT-2's is the approximation by tanh
    assert job["train"]["batch_size"] == emitted["train"]["batch_size"]
    assert job["data"]["options"]["sequence"] == emitted["data"]["options"]["sequence"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_small_one_trains(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with TokenWriter(tmp_path / "tokens", vocabulary=VOCABULARY, tokenizer="t", end=0) as writer:
        for _ in range(20):
            writer.add(random.integers(1, VOCABULARY, 200))
    log = tmp_path / "log.jsonl"
    settings = {f"model.options.{key}": value for key, value in TINY.items()}
    settings |= {"data.path": tmp_path / "tokens", "data.options.sequence": 16, "data.options.validation": 0.05}
    settings |= {"parallel.microbatches": 2, "train.batch_size": 8, "train.max_steps": 2}
    settings |= {"train.lr_schedule.warmup_steps": 1, "runtime.transport": "local", "log.path": log, "log.every": 1}
    settings |= {"checkpoint.dir": tmp_path / "saved"} | TRAINED[name]
    changes = [f"--set={key}={value}" for key, value in settings.items()]
    assert main(["--config", str(JOBS / f"{name}.yaml"), *changes]) == 0
    losses = [step["loss"] for line in log.read_text().splitlines() if (step := json.loads(line))["event"] == "step"]
    assert losses == pytest.approx([math.log(VOCABULARY)] * 2, rel=0.05)


def test_the_documentation_lists_them() -> None:
    row = re.compile(r"^\| `examples/jobs/(.*?)\.yaml` \| ([\d.]+) (M|B)\b", re.MULTILINE)
    rows = row.findall(DOCS.read_text(encoding="utf-8"))
    listed = {name: float(number) * {"M": 1e6, "B": 1e9}[unit] for name, number, unit in rows}
    assert listed == {name: pytest.approx(count, rel=0.01) for name, (_, count) in PUBLISHED.items()}
