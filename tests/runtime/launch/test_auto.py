"""`parallel: auto` and files of `tune`: plans are chosen, compile, and learn what one process learns."""

import json
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.runtime.blocks.block_builders import on_meta
from quintsched.runtime.data import DataSpec, load_dataset
from quintsched.runtime.launch.auto_plan import choose
from quintsched.runtime.launch.prediction_flags import row_of
from quintsched.runtime.launch.run_arguments import RunRequest
from quintsched.runtime.launch.worker import main, prepare
from quintsched.runtime.models import build_model, model_sizes
from quintsched.runtime.settings.job_file import DataConfig, JobConfig, ModelConfig
from quintsched.strategies.descriptions.model import Experts, Images, Model
from quintsched.strategies.descriptions.parameters import total
from quintsched.strategies.tuning.export.emit import emit

from ...helpers.jobs import run_job

TEXT = {"name": "text", "options": {"sequence": 16, "max_bytes": 3000}}

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"hidden": 32, "depth": 4, "heads": 4, "kv_heads": 2, "positions": "rope"},
    "moe-gpt": {"hidden": 32, "depth": 2, "heads": 4, "experts": 4, "shared_experts": 1, "every": 2},
    "vit": {"hidden": 32, "depth": 4, "heads": 4},
}


def job(name: str = "gpt", parallel: Any = "auto", **sections: Any) -> JobConfig:
    data = {"name": "digits"} if name == "vit" else TEXT
    return JobConfig.model_validate(
        {
            "model": {"name": name, "options": MODELS[name]},
            "data": data,
            "parallel": parallel,
            "train": {"batch_size": 16},
            "runtime": {"transport": "local", "precision": "float64"},
            **sections,
        }
    )


def auto(world: int = 4, **more: Any) -> dict[str, Any]:
    return {"auto": {"world": world, "hardware": "a100-80gb", **more}}


def spec_of(name: str) -> DataSpec:
    return load_dataset(DataConfig.model_validate({"name": "digits"} if name == "vit" else TEXT)).spec


def test_the_sizes_of_a_built_in_model_are_its_own() -> None:
    for name, options in (
        *MODELS.items(),
        ("gpt", {"norm": "rmsnorm", "activation": "swiglu", "heads": 4, "kv_heads": 1}),
        ("gpt", {"positions": "learned", "tied": False, "mlp_ratio": 3}),
    ):
        config, spec = ModelConfig(name=name, options=options), spec_of(name)
        blocks = [on_meta(block) for block in build_model(config, spec)]
        assert total(model_sizes(config, spec)) == sum(p.numel() for block in blocks for p in block.parameters())
    for pads, padded_to in ((True, 1.25), (False, None)):
        options = MODELS["moe-gpt"] | {"capacity_factor": 1.25, "pad_to_capacity": pads}
        sizes = model_sizes(ModelConfig(name="moe-gpt", options=options), spec_of("gpt"))
        assert sizes.experts.padded_to == padded_to


@pytest.mark.parametrize(("name", "world"), [("gpt", 1), ("vit", 8)])
def test_a_plan_of_that_many_ranks_is_chosen(name: str, world: int) -> None:
    chosen = choose(job(name, auto(world)))
    assert chosen.plan.check().sound
    assert chosen.job.parallel.auto is None
    assert row_of(chosen.job, chosen.plan)["gpus"] == chosen.plan.mesh.size == world


def train(name: str, parallel: Any) -> list[float]:
    """Run a job in this process, all its ranks, and return the loss of each step."""
    content = job(name).model_dump(exclude_unset=True)
    return [record["loss"] for record in run_job({**content, "parallel": parallel}) if record["event"] == "step"]


@pytest.mark.parametrize(("name", "axes"), [("gpt", {"tp": 2, "cp": 2}), ("moe-gpt", {"pp": 1, "ep": 2})])
def test_what_is_chosen_learns_what_one_rank_learns(name, axes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = choose(job(name, auto(4, axes=axes))).plan
    losses = train(name, auto(4, axes=axes))
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("parallel: auto: ")
    assert second.startswith("why: ")
    replicas = plan.mesh.axis_size("dp") * plan.mesh.axis_size("ep")
    alone = train(name, {"microbatches": plan.schedule.microbatches * replicas})
    assert losses == pytest.approx(alone, rel=1e-10)
    assert losses[-1] < losses[0]


def test_what_cannot_be_chosen_is_an_error(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text("like: l4\nmemory_gb: 0.001\nreserved_gb: 0.0\n")
    for name, parallel, words in (
        ("gpt", {**auto(), "mesh": "dp=4"}, "the section says mesh too"),
        ("gpt", {**auto(), "microbatches": 4, "plan": "p.json"}, "microbatches, plan too"),
        ("gpt", {**auto(), "recompute": 2}, "knows recompute 0 and 1"),
        ("gpt", auto(axes={"tp": 4}), "gpt takes tp of 1, 2"),
        ("vit", auto(axes={"cp": 2}), "vit takes cp of 1"),
        ("gpt", auto(7), "no mesh of 7"),
        ("gpt", auto(hardware="a1000"), "unknown hardware 'a1000'"),
    ):
        with pytest.raises(qs.UsageError, match=words):
            choose(job(name, parallel))
    with pytest.raises(qs.MisfitError, match="none fits"):
        choose(job("gpt", auto(2, hardware=str(tiny))))
    mine = ModelConfig(name="mine.py:build")
    with pytest.raises(qs.UsageError, match=r"mine\.py:build is a function, whose sizes no prediction knows"):
        choose(job().model_copy(update={"model": mine}))


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
    strategy = qs.Strategy(gpus=4, batch=16, seq=model.seq, microbatch=2, **given)
    written = emit(model, strategy, tmp_path)
    job, plan, _ = prepare(RunRequest(plan=str(written.files["plan"]), config=str(written.files["job"])), alone=True)
    row = row_of(job, plan)
    for axis in ("dp", "tp", "pp", "cp", "ep"):
        assert row[axis] == getattr(strategy, axis)
    assert (row["microbatch"], row["zero"], row["batch"]) == (2, strategy.zero, 16)
    small = {} if model.images else {"data.options.max_bytes": 3000}
    files = (str(written.files["plan"]), "--config", str(written.files["job"]))
    alone = emit(model, qs.Strategy(gpus=1, batch=16, seq=model.seq, microbatch=2), tmp_path / "alone")
    one = losses(tmp_path, str(alone.files["plan"]), "--config", str(alone.files["job"]), **small)
    assert losses(tmp_path, *files, **small) == pytest.approx(one, rel=1e-10)
