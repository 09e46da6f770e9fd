"""The examples do what they say; jobs of published sizes have their parameters and the plans of their searches."""

import json
import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from quintsched.cli import main as quintsched
from quintsched.runtime import load_job, plan_of
from quintsched.runtime.blocks.block_builders import on_meta
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models import build_model, model_sizes, tied_weights
from quintsched.strategies.descriptions.parameters import active, total
from quintsched.tokens import TokenWriter

from .helpers import commands
from .helpers.run_logs import START, step, write_log
from .tutorials import ROOT

EXAMPLES = ROOT / "examples"

JOBS = {
    **{"baseline": "dp=1", "simple_dp": "dp=2", "simple_pp": "pp=2", "simple_tp": "tp=2", "simple_cp": "cp=2"},
    **{"simple_ep": "ep=2", "ring": "dp=3", "zero": "dp=2", "killed_run": "pp=4", "offload": "pp=4"},
    **{"text_gpt": "pp=2", "full_3d": "dp=2,pp=2,tp=2", "full_5d": "dp=2,pp=2,ep=2,cp=2,tp=2"},
    **{"mnist": "dp=2,pp=2,tp=2", "text_4d": "dp=2,pp=2,cp=2,tp=2", "tokens_gpt": "dp=2,pp=2"},
    **{"finetune": "dp=2,pp=2", "moe_overlap": "ep=2,pp=2"},
}
"""Mesh of each job."""


def test_every_job_file_is_known_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(JOBS)


@pytest.mark.parametrize(("name", "mesh"), JOBS.items())
def test_job_files_give_sound_plans(name: str, mesh: str) -> None:
    plan = plan_of(load_job(EXAMPLES / f"{name}.yaml"))
    assert str(plan.mesh) == mesh
    assert plan.check().sound


def train(name: str, log: Path, *settings: str) -> list[float]:
    """Run an example in this process, all its ranks, and return the loss of each step."""
    settings = ("runtime.transport=local", "log.every=1", f"log.path={log}", *settings)
    changes = [part for setting in settings for part in ("--set", setting)]
    assert main(["--config", str(EXAMPLES / f"{name}.yaml"), *changes]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "step"]


@pytest.mark.slow
def test_the_gpt_learns_to_read_token_shards(tmp_path: Path) -> None:
    for name, files in (("docs", [ROOT / "README.md"]), ("code", sorted(EXAMPLES.glob("*.py")))):
        with pytest.raises(SystemExit) as ended:
            quintsched(["data", "tokenize", *map(str, files), "-o", str(tmp_path / name)])
        assert not ended.value.code
    settings = (f"data.path={tmp_path}", "data.options.samples=320", "data.options.sequence=64")
    losses = train("tokens_gpt", tmp_path / "log.jsonl", *settings)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1] < 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "microbatches", "most"), [("text_4d", 4, 9000), ("full_5d", 8, 4000)])
def test_meshes_of_four_and_five_axes_learn_what_one_rank_learns(name, microbatches, most, tmp_path: Path) -> None:
    settings = ("runtime.precision=float64", f"data.options.max_bytes={most}")
    mesh = train(name, tmp_path / "mesh.jsonl", *settings)
    one = ("parallel.mesh=dp=1", f"parallel.microbatches={microbatches}")
    alone = train(name, tmp_path / "one.jsonl", *settings, *one)
    assert mesh == pytest.approx(alone, rel=1e-10)
    assert alone[-1] < alone[0]


def run(example: str, *launcher: str, arguments: tuple[str, ...] = ()) -> str:
    """Run an example in a process of its own, and return what it prints."""
    code, out, err = commands.run(sys.executable, *launcher, EXAMPLES / example, *arguments, timeout_s=200)
    assert code == 0, err
    return out


def figures(printed: str) -> list[list[float]]:
    """Return step, loss and gradient norm of each line."""
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in printed.splitlines()]


@pytest.mark.slow
@pytest.mark.processes
def test_own_loop_learns_the_same_in_one_process_and_in_four() -> None:
    alone = figures(run("own_loop.py"))
    steps, losses, _ = zip(*alone, strict=True)
    assert steps == (0, 20, 40, 60, 80, 100)
    assert losses[0] > 2
    assert losses[-1] < 0.3
    four = figures(run("own_loop.py", "-m", "torch.distributed.run", "--nproc-per-node", "4"))
    assert four == [pytest.approx(line, abs=0.01) for line in alone]


@pytest.mark.slow
@pytest.mark.processes
def test_a_trainer_of_objects_learns_the_same_in_one_process_and_in_four() -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "4")
    alone, four = run("trainer.py"), run("trainer.py", *torchrun, arguments=("dp=2,pp=2",))
    of_epochs = [
        [line.rpartition("  ")[0] for line in printed.splitlines() if line.startswith("epoch")]
        for printed in (alone, four)
    ]
    assert of_epochs[0] == of_epochs[1]
    assert re.search(r"validation loss 0\.[3-6]\d+", of_epochs[0][-1])


@pytest.mark.slow
@pytest.mark.processes
def test_a_plain_model_cut_over_two_processes_has_the_losses_of_the_whole_one() -> None:
    code = (EXAMPLES / "tensor_parallel.py").read_text(encoding="utf-8")
    assert len([line for line in code.splitlines() if line]) <= 30
    printed = run("tensor_parallel.py", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    whole, cut = (line.split() for line in printed.splitlines())
    assert (whole[:2], cut[:2]) == (["whole", "66826"], ["cut", "33802"])
    assert [*map(float, whole[4:])] == pytest.approx([*map(float, cut[4:])], abs=2e-4)
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert figures(printed) == [pytest.approx(line, abs=0.01) for line in figures(guide_session(guide))]


def guide_session(guide: str) -> str:
    """Return what the guide shows of this example."""
    session = re.findall(r"^\$ torchrun .*tensor_parallel.py\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert len(session) == 1
    return str(session[0])


def compare_curves(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    """Run the script and return what it exits with."""
    monkeypatch.setattr(sys, "argv", ["compare_curves.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "compare_curves.py"), run_name="__main__")
    return ended.value.code


def test_curves_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    epoch, losses = {"event": "epoch", "epoch": 1, "loss": 1.0}, {"eight": (2.0, 1.0, 0.50001), "one": (2.0, 1.0, 0.5)}
    eight, one = (
        write_log(tmp_path / f"{name}.jsonl", START, *(step(5 + 5 * k, loss=loss) for k, loss in enumerate(of)), epoch)
        for name, of in losses.items()
    )
    assert compare_curves(monkeypatch, eight, one) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "eight", "one", "difference"]
    assert [line.split()[:4] for line in lines] == [
        ["5", "2.000000", "2.000000", "0.0e+00"],
        ["10", "1.000000", "1.000000", "0.0e+00"],
        ["15", "0.500010", "0.500000", "1.0e-05"],
    ]
    assert last == "largest difference: 2.0e-05 of the loss, at step 15 (allowed: 0.001)"
    assert compare_curves(monkeypatch, eight, one, "--tolerance", "1e-5") == 1


SIZED = Path(__file__).parents[1] / "examples" / "jobs"
DOCS = SIZED.parents[1] / "docs" / "jobs.md"

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
    assert {path.stem for path in SIZED.glob("*.yaml")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_jobs_give_sound_plans(name: str) -> None:
    job = load_job(SIZED / f"{name}.yaml")
    assert plan_of(job).check().sound
    assert job.train.max_steps is not None
    assert job.train.lr_schedule.warmup_steps < job.train.max_steps


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_models_have_the_published_parameters(name: str, published: tuple[int, int]) -> None:
    job, (vocabulary, parameters) = load_job(SIZED / f"{name}.yaml"), published
    data = DataSpec(input_shape=(job.data.options["sequence"],), num_classes=vocabulary)
    sizes = model_sizes(job.model, data)
    assert total(sizes) == parameters
    if sizes.experts is not None:
        assert active(sizes) == pytest.approx(ACTIVE, rel=0.01)
    tied = {other for _, *others in tied_weights(job.model).values() for other in others}
    built = [on_meta(block) for block in build_model(job.model, data)]
    weights = {f"{at}.{key}": w for at, block in enumerate(built) for key, w in block.named_parameters()}
    assert sum(weight.numel() for key, weight in weights.items() if key not in tied) == parameters


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_job_has_the_strategy_of_the_search_it_names(name: str, tmp_path: Path) -> None:
    text = (SIZED / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"^#   quintsched (tune .*) --emit best$", text.replace("\\\n#", ""), re.MULTILINE)
    with pytest.raises(SystemExit) as ended:
        quintsched([*shlex.split(found[1]), "--top", "1", "--emit", str(tmp_path)])
    assert not ended.value.code
    emitted, job = yaml.safe_load((tmp_path / "job.yaml").read_text()), yaml.safe_load(text)
    assert job["parallel"] == emitted["parallel"]
    chosen = load_job(SIZED / f"{name}.yaml").model.options, load_job(tmp_path / "job.yaml").model.options
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
    assert main(["--config", str(SIZED / f"{name}.yaml"), *changes]) == 0
    losses = [step["loss"] for line in log.read_text().splitlines() if (step := json.loads(line))["event"] == "step"]
    assert losses == pytest.approx([math.log(VOCABULARY)] * 2, rel=0.05)


def test_the_documentation_lists_them() -> None:
    row = re.compile(r"^\| `examples/jobs/(.*?)\.yaml` \| ([\d.]+) (M|B)\b", re.MULTILINE)
    rows = row.findall(DOCS.read_text(encoding="utf-8"))
    listed = {name: float(number) * {"M": 1e6, "B": 1e9}[unit] for name, number, unit in rows}
    assert listed == {name: pytest.approx(count, rel=0.01) for name, (_, count) in PUBLISHED.items()}
