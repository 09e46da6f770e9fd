"""Strategies become plans and job files, and arguments that the parsers of frameworks know."""

import json
from pathlib import Path

import pytest
import yaml

import quintsched as qs
from quintsched.strategies.descriptions.presets_and_files import model_names
from quintsched.strategies.prediction.strategy_plans import plan_of
from quintsched.strategies.tuning.export.emit import built_in, emit, emit_for, job_file
from quintsched.strategies.tuning.export.frameworks import FRAMEWORKS, OWN, restrict
from quintsched.strategies.tuning.published_recipes import beside, find_recipe, recipes
from tests.helpers.refusals import require_refusals

GPT = qs.Model(layers=6, hidden=64, heads=4, vocab=256, seq=64)


def strategy(**given: object) -> qs.Strategy:
    return qs.Strategy(**{"gpus": 4, "pp": 2, "tp": 2, "batch": 8, "seq": 64, **given})


def test_the_files_say_the_strategy(tmp_path):
    sizes = {"schedule": "interleaved-1f1b", "chunks": 3, "zero": 1, "sequence_parallel": True}
    written = emit(GPT, strategy(gpus=8, dp=2, recompute="full", **sizes), tmp_path / "new")
    plan, job = qs.Plan.load(written.files["plan"]), yaml.safe_load(written.files["job"].read_text())
    assert plan.check().sound
    more = {"mesh": "pp=2,dp=2,tp=2", "microbatches": 4, "stages": [2, 1, 1, 1, 1, 2], "recompute": 1}
    assert job["parallel"] == sizes | more
    options = {"hidden": 64, "depth": 6, "heads": 4, "mlp_ratio": 4, "dropout": 0.1, "norm": "layernorm"}
    options |= {"positions": "learned", "activation": "gelu", "tied": True}
    assert job["model"] == {"name": "gpt", "options": options}
    assert (job["train"]["batch_size"], job["runtime"]["precision"]) == (8, "bfloat16")
    assert (plan.mesh.size, plan.schedule.microbatches, plan.zero.stage) == (8, 4, 1)
    assert dict(plan.tied) == {"embedding": (0, 5)}
    assert not written.notes


def test_as_many_layers_are_recomputed_as_the_strategy_says_or_more():
    for number in range(7):
        plan = plan_of(GPT, strategy(pp=1, gpus=2, schedule="1f1b", chunks=1, recompute=number))
        every = plan.layout.recompute_every(0)
        again = sum(every > 0 and place % every == every - 1 for place in range(1, 7))
        assert number <= again <= max(number + 1, 0 if number < 4 else 6)


@pytest.mark.parametrize("name", model_names())
def test_every_preset_has_a_job_file(name):
    model = qs.find_model(name)
    text = job_file(model, qs.Strategy(gpus=8, dp=8, batch=8, seq=model.images.tokens if model.images else 128))
    job = yaml.safe_load(text)
    own = built_in(model)[1] is not None
    assert (job["model"]["name"] == "my_model.py:build") is not own
    assert ("# model.name: your function that builds" in text) is not own


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    require_refusals(("cannot be made", lambda: emit(GPT, strategy(), tmp_path / "file")))


PARSERS = json.loads((Path(__file__).parents[2] / "data" / "framework_arguments.json").read_text(encoding="utf-8"))


def names_in(path: Path) -> set[str]:
    """Return the names of arguments in a file; of JSON, keys with dots."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return {line.split()[0] for line in text.splitlines()}
    inner = [(name, value if isinstance(value, dict) else [""]) for name, value in json.loads(text).items()]
    return {f"{name}.{key}".rstrip(".") for name, keys in inner for key in keys}


def strategies(name: str):
    """Yield strategies that between them need every argument."""
    both = {"gpus": 16, "batch": 64, "seq": 4096, "gradients": "bf16", "recompute": "full"}
    if name == "megatron":
        more = {"schedule": "interleaved-1f1b", "chunks": 2, "sequence_parallel": True, "fused_loss": True, "zero": 1}
        yield qs.Strategy(dp=2, tp=2, pp=2, ep=2, ep_overlap=True, **both, **more)
        for recompute in (2, "layernorm+moe_act", "none"):
            yield qs.Strategy(dp=8, cp=2, dtype="fp8", **{**both, "recompute": recompute})
        yield qs.Strategy(dp=4, tp=2, pp=2, dtype="fp16", overlap=False, chunks=2, **{**both, "gradients": "fp32"})
    elif name == "torchtitan":
        yield qs.Strategy(dp=4, tp=2, pp=2, zero=3, schedule="zbv", **both)
        yield qs.Strategy(dp=8, ep=2, zero=2, dtype="fp32", **both)
    else:
        yield qs.Strategy(dp=8, tp=2, zero=2, **both)
        yield qs.Strategy(dp=8, pp=2, zero=1, dtype="fp16", **both)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_argument_is_known_to_its_parser(tmp_path, name, every):
    repository, _, commit = FRAMEWORKS[name].parser
    assert (PARSERS[name]["repository"], PARSERS[name]["commit"]) == (repository, commit)
    for model in map(qs.find_model, [*model_names()][::every]):
        for strategy in strategies(name):
            written = emit_for(name, model, strategy, tmp_path)
            assert names_in(written.files["arguments"]) <= {*PARSERS[name]["names"]}
            assert commit[:12] in written.notes[0]


def test_arguments_say_the_strategy(tmp_path):
    asked = qs.Strategy(gpus=64, dp=4, tp=4, pp=4, batch=256, seq=8192, zero=1, recompute=3, sequence_parallel=True)
    lines = (
        emit_for("megatron", qs.find_model("llama-3-70b"), asked, tmp_path).files["arguments"].read_text().splitlines()
    )
    wanted = {"--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 4", "--recompute-num-layers 3"}
    assert wanted | {"--global-batch-size 256", "--use-distributed-optimizer", "--num-query-groups 8"} <= {*lines}
    asked = asked.model_copy(update={"gpus": 256, "pp": 16, "stages": (*[4] * 8, *[6] * 8)})
    lines = (
        emit_for("megatron", qs.find_model("llama-3-70b"), asked, tmp_path).files["arguments"].read_text().splitlines()
    )
    assert f"--pipeline-model-parallel-layout E{'|'.join(['tttt'] * 8 + ['tttttt'] * 8)}L" in lines
    asked = qs.Strategy(gpus=8, dp=4, pp=2, chunks=2, batch=64, seq=1024, overlap=False, dtype="fp16", gradients="fp32")
    lines = emit_for("megatron", qs.find_model("gpt2"), asked, tmp_path).files["arguments"].read_text().splitlines()
    assert {"--no-overlap-p2p-communication", "--accumulate-allreduce-grads-in-fp32", "--fp16"} <= {*lines}
    asked = qs.Strategy(gpus=8, dp=4, tp=2, zero=2, batch=64, seq=1024)
    found = json.loads(emit_for("deepspeed", qs.find_model("gpt2"), asked, tmp_path).files["arguments"].read_text())
    of_gpu = found["gradient_accumulation_steps"] * found["train_micro_batch_size_per_gpu"]
    assert found["train_batch_size"] == 4 * of_gpu
    assert (found["zero_optimization"]["stage"], found["tensor_parallel"]) == (2, {"autotp_size": 2})
    job = emit_for(OWN, qs.find_model("gpt2"), qs.Strategy(gpus=2, dp=2, batch=8, seq=1024), tmp_path).files["job"]
    assert yaml.safe_load(job.read_text())["parallel"]["mesh"] == "dp=2"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_search_has_only_strategies_that_the_framework_runs(name):
    fixed, runs = restrict(name, {"pp": [1, 2], "tp": [1, 2], "cp": [1]}), FRAMEWORKS[name].runs
    found = qs.tune(qs.find_model("gpt2-xl"), qs.find_hardware("a100-40gb"), 8, 64, 1024, fixed=fixed, top=50)
    assert found.best
    for one in found.best:
        for axis in {*runs} - {"schedule", "sequence_parallel"}:
            assert getattr(one.strategy, axis) in runs[axis]
        assert FRAMEWORKS[name].recomputes(one.strategy.recompute)
        assert one.strategy.schedule in runs.get("schedule", (one.strategy.schedule,))
        assert name != "deepspeed" or one.strategy.zero <= 1, "beside a pipeline"


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("megatrn", {}, "megatron"),
        ("megatron", {"schedule": ["zbv"]}, "does not run schedule zbv; it runs 1f1b"),
        ("megatron", {"recompute": ["mlp_act"]}, "does not run recompute mlp_act"),
        ("deepspeed", {"pp": [2], "zero": [3]}, "does not run zero 3; it runs 0, 1"),
        ("torchtitan", {"zero": [1]}, "does not run zero 1"),
    ],
)
def test_what_a_framework_does_not_run_is_refused(name, given, says):
    with pytest.raises(qs.UsageError, match=says):
        restrict(name, given)


def test_a_published_recipe_stands_beside_the_best():
    recipe = find_recipe("BLOOM")
    assert recipe in recipes()
    choices = recipe.choices({"pp": [12], "tp": [4], "schedule": ["1f1b"]})
    sizes = {name: choices.pop(name) for name in ("model", "hardware", "gpus", "batch", "seq")}
    model, hardware = qs.find_model(sizes["model"]), qs.find_hardware(sizes["hardware"])
    found = qs.tune(model, hardware, sizes["gpus"], sizes["batch"], sizes["seq"], fixed=choices, top=3)
    *_, regret = beside(found, recipe)
    assert "over the best" in regret
    require_refusals(
        ("leave it out", lambda: recipe.choices({"gpus": 8})), ("several recipes", lambda: find_recipe("llama-3-405b"))
    )
