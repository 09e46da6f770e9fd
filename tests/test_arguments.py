"""Wrong arguments of every public name in docs/api.md: one error of ours that names the argument, and no traceback."""

import re
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched import runtime
from quintsched.check_call_arguments import SEVERAL, WHOLE_NUMBER, items
from quintsched.errors import import_advice
from quintsched.runtime import Engine, run_local, split
from quintsched.runtime.comm import SelfGroup

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PLAN = qs.compile("1f1b", mesh="pp=1", microbatches=2)
FORWARD = qs.compile("inference", mesh="pp=1", microbatches=2)
MODEL, HARDWARE = qs.find_model("gpt3-175b"), qs.find_hardware("a100-80gb")
STRATEGY = qs.Strategy(gpus=8, dp=8, batch=8, seq=128)
ALONE = SelfGroup(0, torch.device("cpu"))


def order(rank: int, shape: qs.Shape) -> list[Any]:
    return []


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine(*changed: Any, **options: Any) -> Engine:
    usual = (PLAN, [nn.Linear(2, 2)], nn.MSELoss(), sgd)
    return Engine(*[*changed, *usual[len(changed) :]], **options)


def drain(*given: Any, **options: Any) -> None:
    list(runtime.drained(*given, **options))


WRONG: list[tuple[str, str, Callable[[], object]]] = [
    ("compile", "compile: missing a required argument: 'schedule'; write compile(", lambda: qs.compile(mesh=4)),
    ("compile", "as @qs.schedule makes it", lambda: qs.compile(order, mesh="pp=2", microbatches=8)),
    ("compile", "mesh", lambda: qs.compile("1f1b", mesh=4, microbatches=8)),
    ("compile", "microbatches", lambda: qs.compile("1f1b", mesh="pp=2", microbatches="8")),
    ("compile", "'chunkz'; did you mean 'chunks'?", lambda: qs.compile("1f1b", mesh="pp=2", microbatches=8, chunkz=1)),
    ("check", "plan", lambda: qs.check("plan.json")),
    ("check", "plan is the class Linear; give a Plan", lambda: qs.check(nn.Linear)),
    ("check", "profile", lambda: qs.check(PLAN, profile=["channel"])),
    ("simulate", "plan", lambda: qs.simulate("1f1b")),
    ("simulate", "costs", lambda: qs.simulate(PLAN, {"forward": 1})),
    ("schedule", "name", lambda: qs.schedule(order)),
    ("schedule", "max_chunks", lambda: qs.schedule("mine", max_chunks="2")),
    ("schedule", "placement", lambda: qs.schedule("mine", placement=(0, 1))),
    ("schedule", "order", lambda: qs.schedule("mine")([1, 2])),
    ("predict", "model", lambda: qs.predict("gpt3-175b", HARDWARE, STRATEGY)),
    ("predict", "hardware", lambda: qs.predict(MODEL, "a100-80gb", STRATEGY)),
    ("tune", "model", lambda: qs.tune("gpt3-175b", HARDWARE, 8, 8)),
    ("tune", "gpus", lambda: qs.tune(MODEL, HARDWARE, "8", 8)),
    ("find_model", "gpt9", lambda: qs.find_model("gpt9")),
    ("find_model", "hiden", lambda: qs.find_model({"like": "gpt3-175b", "hiden": 4})),
    ("find_hardware", "hardware", lambda: qs.find_hardware(4)),
    ("find_hardware", "memry", lambda: qs.find_hardware({"like": "a100-80gb", "memry": 4})),
    ("Mesh", "dp", lambda: qs.Mesh(dp="2")),
    ("Mesh", "xp", lambda: qs.Mesh(xp=2)),
    ("Plan", "path", lambda: qs.Plan.load(4)),
    ("Plan", "path is a dict", lambda: PLAN.save({})),
    ("Costs", "forward", lambda: qs.Costs(forward="fast")),
    ("Costs", "foward", lambda: qs.Costs(foward=1)),
    ("Model", "hidden", lambda: qs.Model(**{**MODEL.model_dump(), "hidden": "wide"})),
    ("Model", "hiden", lambda: qs.Model(**MODEL.model_dump(), hiden=4)),
    ("Hardware", "memory_gb", lambda: qs.Hardware(**{**HARDWARE.model_dump(), "memory_gb": "much"})),
    ("Hardware", "memry", lambda: qs.Hardware(**HARDWARE.model_dump(), memry=4)),
    ("Strategy", "batch", lambda: qs.Strategy(gpus=8, batch="8", seq=1)),
    ("Strategy", "seq", lambda: qs.Strategy(gpus=8, batch=8)),
    ("Strategy", "batch and seq missing; write Strategy(gpus=…, batch=…, seq=…)", lambda: qs.Strategy(gpus=8, tp=3)),
    ("Engine", "plan is a list", lambda: Engine([nn.Linear(2, 2)], PLAN, nn.MSELoss(), sgd)),
    ("Engine", "blocks is a whole Bilinear", lambda: engine(PLAN, nn.Bilinear(2, 2, 2))),
    ("Engine", "blocks is a function", lambda: engine(PLAN, order)),
    ("Engine", "loss_fn", lambda: engine(PLAN, [nn.Linear(2, 2)], sgd([nn.Parameter(torch.ones(1))]), nn.MSELoss())),
    ("Engine", "optimizer", lambda: engine(PLAN, [nn.Linear(2, 2)], nn.MSELoss(), nn.MSELoss())),
    ("Engine", "metrics", lambda: engine(metrics=[order])),
    ("Engine", "transport", lambda: engine(transport="gloo")),
    ("Engine", "clipp", lambda: engine(clipp=1.0)),
    ("Engine", "give dtype=torch.bfloat16", lambda: engine(dtype="float64")),
    ("Engine", "other than 'loss' and 'weight'", lambda: engine(metrics={"loss": order})),
    ("Engine", "block_costs", lambda: engine(block_costs=[-1.0])),
    ("Engine", "trace_steps", lambda: engine(trace_steps=3)),
    ("Engine", "wants_stop", lambda: engine(wants_stop=True)),
    ("Engine", "spike_dir", lambda: engine(spike_dir=3)),
    ("Engine", "blocks is empty", lambda: engine(PLAN, [])),
    ("Engine", "weights on the meta device", lambda: engine(PLAN, [nn.Linear(2, 2, device="meta")])),
    ("Engine", "'0.bias' is given 3", lambda: engine().set_weights({"0.bias": 3})),
    ("Engine", "decay", lambda: engine().ema("0.9")),
    ("Engine", "state", lambda: engine().load_state_dict(None)),
    ("Engine", "make", lambda: engine().lr_schedulers(3)),
    (
        "Engine",
        "beside['x'] is an object that is no plain data",
        lambda: engine().save_dcp("x", beside={"x": object()}),
    ),
    ("Engine", "argument: 'targets'; write engine.step(inputs, targets)", lambda: engine().step(torch.ones(2, 2))),
    ("Engine", "4 were given; write engine.evaluate(inputs, targets)", lambda: engine().evaluate(1, 2, 3)),
    ("Engine", "microbatches='2'", lambda: engine().step(torch.ones(2, 2), torch.ones(2, 2), microbatches="2")),
    ("ForwardEngine", "plan", lambda: runtime.ForwardEngine([nn.Linear(2, 2)], FORWARD)),
    ("ForwardEngine", "this plan (1f1b) is for train", lambda: runtime.ForwardEngine(PLAN, [nn.Linear(2, 2)])),
    ("SumOfMeans", "SumOfMeans takes pairs", lambda: runtime.SumOfMeans(nn.MSELoss())),
    ("SumOfMeans", "pairs of functions", lambda: runtime.SumOfMeans((nn.MSELoss(), 4))),
    ("StopRequest", "under_torchrun", lambda: runtime.StopRequest(under_torchrun="yes")),
    ("drained", "loader", lambda: drain(4, engine())),
    ("drained", "engine", lambda: drain([], "engine")),
    ("JobConfig", "train", lambda: runtime.JobConfig(train=4)),
    ("JobConfig", "trian", lambda: runtime.JobConfig(trian={})),
    ("load_job", "path", lambda: runtime.load_job({"train": {}})),
    ("load_job", "nowhere.yaml", lambda: runtime.load_job("nowhere.yaml")),
    ("plan_of", "job", lambda: runtime.plan_of("job.yaml")),
    ("plan_of", "plan_path", lambda: runtime.plan_of(runtime.JobConfig(), PLAN)),
    ("connect", "backend", lambda: runtime.connect(4)),
    ("connect", "glooo", lambda: runtime.connect("glooo")),
    ("connect_for", "plan", lambda: runtime.connect_for("gloo", 60)),
    ("connect_for", "timeout_s", lambda: runtime.connect_for(PLAN, "gloo")),
    ("run_local", "world_size is a function", lambda: run_local(order, 4)),
    ("run_local", "world_size is True; give a whole number from 1", lambda: run_local(True, order)),
    ("run_local", "fn is None; give a function", lambda: run_local(2, None)),
    ("run_local", "timeout_s", lambda: run_local(2, order, "60")),
    ("build_model", "blocks is a Linear", lambda: runtime.build_model(nn.Linear(2, 2))),
    ("build_model", "seed", lambda: runtime.build_model([nn.Linear(2, 2)], seed="0")),
    ("measure_costs", "blocks", lambda: runtime.measure_costs(torch.ones(2, 2), [nn.Linear(2, 2)])),
    ("measure_costs", "example", lambda: runtime.measure_costs([nn.Linear(2, 2)], "text")),
    ("split", "model is 'gpt2'", lambda: split("gpt2")),
    ("split", "Linear is one layer, with nothing to split; pass it as a block", lambda: split(nn.Linear(2, 2))),
    ("split", "blocks", lambda: split(nn.Linear(2, 2), blocks="layers.*")),
    ("split", "example", lambda: split(nn.Bilinear(2, 2, 2), example="text")),
    ("Split", "blocks is a Linear", lambda: runtime.Split(nn.Linear(2, 2))),
    ("Split", "blocks is 4", lambda: runtime.Split(4)),
    ("defer", "parameter", lambda: runtime.defer("weight", order, ())),
    ("defer", "product", lambda: runtime.defer(nn.Parameter(torch.ones(1)), 4, ())),
    ("MoE", "hidden", lambda: runtime.MoE(nn.Linear(2, 2), 4, 2)),
    ("MoE", "experts", lambda: runtime.MoE(8, "4", order)),
    ("apply_expert_parallel", "module", lambda: runtime.apply_expert_parallel(ALONE, nn.Linear(2, 2))),
    ("apply_expert_parallel", "group", lambda: runtime.apply_expert_parallel(nn.Linear(2, 2), 4)),
    ("apply_tensor_parallel", "module", lambda: runtime.apply_tensor_parallel(ALONE, nn.Linear(2, 2))),
    ("apply_tensor_parallel", "group", lambda: runtime.apply_tensor_parallel(nn.Linear(2, 2), 2)),
    ("ColumnParallelLinear", "in_features", lambda: runtime.ColumnParallelLinear(nn.Linear(2, 2), ALONE, 2)),
    ("ColumnParallelLinear", "out_features", lambda: runtime.ColumnParallelLinear(2, "2", ALONE)),
    ("RowParallelLinear", "in_features", lambda: runtime.RowParallelLinear(nn.Linear(2, 2), ALONE, 2)),
    ("RowParallelLinear", "out_features", lambda: runtime.RowParallelLinear(2, "2", ALONE)),
    ("VocabParallelEmbedding", "num_embeddings", lambda: runtime.VocabParallelEmbedding(nn.Embedding(2, 2), ALONE, 2)),
    ("VocabParallelEmbedding", "embedding_dim", lambda: runtime.VocabParallelEmbedding(2, "2", ALONE)),
]
"""A wrong call of each public name, and what its message has to name."""

GIVEN_BY_US = {
    *("Schedule", "Shape", "Verdict", "Finding", "Simulation", "Prediction", "Tuning", "StepResult"),
    *("LoadedWeights", "Transport", "Group"),
}
"""Types that functions return or hand over; nobody builds these by hand."""

OTHERS = {
    "all_schedules": "takes no arguments",
    "Carry": "takes anything; a block that returns something wrong in it is refused in the first step",
    "Trainer": "has tests of its own",
}


def public(module: str) -> list[str]:
    """Return the names that docs/api.md lists of a module."""
    (section,) = re.findall(rf"^## `{re.escape(module)}`\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return [name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


def test_the_table_has_every_public_name() -> None:
    names = {*public("quintsched"), *public("quintsched.runtime")}
    errors = {name for name in names if name.endswith("Error")}
    calls = Counter(name for name, _, _ in WRONG)
    assert names - errors == {*calls, *GIVEN_BY_US, *OTHERS}
    assert [name for name, times in calls.items() if times < 2] == ["StopRequest"], "two wrong calls of each"


@pytest.mark.parametrize(("name", "argument", "call"), WRONG, ids=[f"{name}-{words}" for name, words, _ in WRONG])
def test_wrong_arguments_are_named(name, argument, call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((qs.QuintschedError, TypeError)) as found:
        call()
    assert argument in str(found.value), name
    if not isinstance(found.value, qs.QuintschedError):  # Python's own, for a call that does not fit the signature
        assert len(traceback.extract_tb(found.value.__traceback__)) <= 4


def test_an_iterator_is_handed_on_unread() -> None:
    numbers = iter([1, 2])
    assert items("whole numbers", WHOLE_NUMBER, SEVERAL).holds(numbers)
    assert [*numbers] == [1, 2]


def test_advice_on_imports_that_fail() -> None:
    hidden = ModuleNotFoundError("Could not import module 'LlamaConfig'")
    hidden.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert "--index-url https://download.pytorch.org/whl/cpu" in import_advice(hidden)
    missing = ModuleNotFoundError("No module named 'peft'", name="peft")
    assert import_advice(missing) == "; pip install 'quintsched[hf]'"
    assert import_advice(ImportError("another")) == import_advice(None) == ""

    def build() -> nn.Module:
        raise hidden

    with pytest.raises(qs.MisfitError, match="torchvision that is installed does not go with this torch"):
        split(build)
