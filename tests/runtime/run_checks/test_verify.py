"""Runs on a mesh beside one process: equal ones are told to be, and in others the first layer that differs is named."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import quintsched as qs
from quintsched.cli import SECTIONS, run_and_verify
from quintsched.cli.app import make_app
from quintsched.runtime import Engine, build_model, load_job, plan_of
from quintsched.runtime.launch import verify_job
from quintsched.runtime.launch.show_job import main
from quintsched.runtime.run_checks.block_facts import ModelFacts
from quintsched.runtime.run_checks.compare_with_one_process import Comparison

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import run_engines
from ..toys import sgd

JOB = """
model: {name: gpt, options: {depth: 2, hidden: 16, heads: 2}}
data: {name: text, options: {sequence: 16, max_bytes: 4000}}
parallel: {mesh: "dp=2,pp=2", schedule: 1f1b, microbatches: 2}
train: {batch_size: 8, clip: 1.0, optimizer: {name: adamw, lr: 1e-3}}
runtime: {transport: local, precision: float64}
"""


def outcome(tmp_path: Path, *overrides: str) -> Comparison:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = load_job(path, list(overrides))
    return verify_job.verify_here(job, plan_of(job), 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.mesh=dp=2,tp=2", "parallel.sequence_parallel=true", "parallel.zero=3", "runtime.precision=float32"],
        ["parallel.mesh=pp=2", "parallel.schedule=zbv", "parallel.microbatches=4", "model.options.dropout=0.1"],
        ["parallel.mesh=cp=2,pp=2", "model.options.tied=true"],
        ["parallel.mesh=cp=2,pp=2", "parallel.recompute=1", "runtime.precision=bfloat16"],
        ["parallel.mesh=ep=2,pp=2", "model.name=moe-gpt", "parallel.zero=2"],
    ],
    ids=lambda overrides: " ".join(o.split(".", 1)[1] for o in overrides),
)
def test_sound_runs_are_equal(tmp_path: Path, overrides: list[str]) -> None:
    found = outcome(tmp_path, *overrides)
    assert found.is_equal, found.explain()
    assert found.compared > 50
    assert not found.skipped


BLIND = """
import torch
from torch import nn

class Mean(nn.Module):
    def forward(self, x, context=None):
        return x + x.float().mean(1, keepdim=True).to(x.dtype)   # over the tokens that are here

def build(data):
    return [lambda: nn.Embedding(data.num_classes, 8), lambda: nn.Linear(8, 8), Mean,
            lambda: nn.Linear(8, data.num_classes)]
"""


def test_the_first_block_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blind.py").write_text(BLIND)
    model = ("model.name=blind.py:build", "model.options={}")
    found = outcome(tmp_path, *model, "parallel.mesh=cp=2,pp=2", "parallel.prove=none")
    first = found.differences[0]
    assert (first.step, first.kind, first.name) == (0, "output", "2")
    assert "the output of block 2 (Mean) for microbatch 0" in found.explain()


@pytest.mark.parametrize("transport", ["local", pytest.param("gloo", marks=[pytest.mark.slow, pytest.mark.processes])])
def test_the_command_compares_runs(transport, tmp_path, monkeypatch, capfd):
    if transport == "local":  # what the command would start a process for
        monkeypatch.setattr(run_and_verify, "call", lambda command: verify_job.main(command[-1:]))
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("local", transport).replace("dp=2,pp=2", "pp=2"))
    found = CliRunner().invoke(make_app(SECTIONS), ["verify", str(path), "--json", "--steps", "1"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout or capfd.readouterr().out)["equal"]


Odd = of_layers(
    "Odd",
    lambda: {"linear": nn.Linear(6, 6, dtype=torch.float64), "factor": 1.0},
    lambda self, x: self.linear(x) * self.factor,
)
"""A block that multiplies by something that is not the same in the engine and in the reference."""


def verified(reference: nn.Module, mesh: str = "dp=2,pp=2") -> list[Comparison]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 8, 6, dtype=torch.float64)
    body = partial(Engine.verify, reference=reference, inputs=inputs, targets=targets)
    plan, told = qs.compile("1f1b", mesh=mesh, microbatches=2), {"clip": 0.1, "dtype": torch.float64}
    return run_engines(plan, lambda: [Odd] * 4, body, nn.functional.mse_loss, sgd, **told)


def test_an_engine_is_compared_with_a_whole_model() -> None:
    model = build_model([Odd] * 4, dtype=torch.float64)
    for found in verified(model):
        assert found.is_equal, found.explain()
        assert not found.skipped
        assert json.loads(json.dumps(found.to_data()))["equal"]
    model[2].factor = 1.5
    for found in verified(model):  # on every rank the same, also on those that hold other blocks
        assert (found.differences[0].kind, found.differences[0].name) == ("output", "2")
    with torch.no_grad():
        model[1].linear.bias[0] += 1e-3
    assert "before the first step: the weight of 1.linear.bias" in verified(model)[0].explain()


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x) * weight + torch.rand_like(x)
        return self.scale(x), x.square().mean()


InPlace = of_kind(nn.Identity, lambda self, x: x.mul_(2))


def test_facts_of_odd_blocks_are_those_of_the_first_step() -> None:
    def blocks() -> list[nn.Module]:
        return [nn.Linear(4, 4), OddBlock(), nn.Sequential(InPlace(), nn.Dropout(0.5)), nn.Linear(4, 3)]

    def body(engine: Engine) -> ModelFacts:
        inputs, weight = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(engine.replica))
        return engine.inspect(inputs, torch.arange(8) % 3, weight=weight)

    plan = qs.compile("1f1b", mesh="pp=2,dp=2", microbatches=2)
    facts, *others = run_engines(plan, blocks, body, nn.functional.cross_entropy, sgd)
    assert all(other == facts for other in others)
    plain, odd, in_place, head = facts.blocks
    assert [one.kind for one in facts.blocks] == ["Linear", "OddBlock", "Sequential", "Linear"]
    assert (plain.takes, plain.changes, plain.draws, plain.loss) == ("float32 (4, 4)", "nothing", "nothing", "none")
    assert odd.takes == "float32 (4, 4), weight"
    assert "buffer norm.running_mean" in odd.changes
    assert odd.draws == "other random numbers"
    assert odd.loss == "a mean over samples"
    assert "what it is given" in in_place.changes
    assert "dropout" in in_place.draws
    assert head.gives == "float32 (4, 3)"
    assert facts.losses == {"loss": "a mean over samples"}
    said = facts.explain()
    assert "block 1: OddBlock\n" in said
    assert "so blocks that change what they are given get copies of it" in said
    assert "so buffers that forwards change are made the same on all replicas" in said


def test_the_command_prints_the_facts_of_a_job(tmp_path: Path, capsys) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("heads: 2", "heads: 2, dropout: 0.1").replace("dp=2,pp=2", "pp=2,tp=2"))
    assert main(["--config", str(job)]) == 0
    said = capsys.readouterr().out
    assert "blocks 1-2: GptBlock\n" in said
    assert "attention.qkv → attention.proj, mlp.fc1 → mlp.fc2" in said
    assert main(["--config", str(job), "--as-json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["draws"] for one in data["blocks"][1:3]] == ["dropout", "dropout"]
    assert main(["--config", str(job), "--set", "parallel.mesh=tp=3"]) == 3
    assert "tp=3" in capsys.readouterr().err
