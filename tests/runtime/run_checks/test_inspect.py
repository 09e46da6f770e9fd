"""Findings of a first step on blocks, loss and metrics, as text: `engine.inspect` and `quintsched inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.launch.show_job import main
from quintsched.runtime.run_checks.block_facts import ModelFacts

from ..toys import sgd

JOB = """
model: {name: gpt, options: {depth: 2, hidden: 16, heads: 2, dropout: 0.1}}
data: {name: text, options: {sequence: 16, max_bytes: 4000}}
parallel: {mesh: "pp=2,tp=2", schedule: 1f1b, microbatches: 2}
train: {batch_size: 8, optimizer: {name: adamw, lr: 1e-3}}
runtime: {transport: gloo}
"""


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x) * weight + torch.rand_like(x)
        return self.scale(x), x.square().mean()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_facts_of_odd_blocks_are_those_of_the_first_step() -> None:
    def rank(transport: Transport) -> ModelFacts:
        blocks = [nn.Linear(4, 4), Odd(), nn.Sequential(InPlace(), nn.Dropout(0.5)), nn.Linear(4, 3)]
        engine = Engine(plan, blocks, F.cross_entropy, sgd, transport=transport)
        generator = torch.Generator().manual_seed(transport.rank % 2)
        inputs, weight = torch.randn(2, 8, 4, generator=generator)
        return engine.inspect(inputs, torch.arange(8) % 3, weight=weight)

    plan = qs.compile("1f1b", mesh="pp=2,dp=2", microbatches=2)
    facts, *others = run_local(4, rank)
    assert all(other == facts for other in others)
    plain, odd, in_place, head = facts.blocks
    assert [one.kind for one in facts.blocks] == ["Linear", "Odd", "Sequential", "Linear"]
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
    assert "block 1: Odd\n" in said
    assert "so blocks that change what they are given get copies of it" in said
    assert "so buffers that forwards change are made the same on all replicas" in said


def test_the_command_prints_the_facts_of_a_job(tmp_path: Path, capsys) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    assert main(["--config", str(job)]) == 0
    said = capsys.readouterr().out
    assert "blocks 1-2: Block\n" in said
    assert "attention.qkv → attention.proj, mlp.fc1 → mlp.fc2" in said
    assert main(["--config", str(job), "--as-json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["draws"] for one in data["blocks"][1:3]] == ["dropout", "dropout"]
    assert main(["--config", str(job), "--set", "parallel.mesh=tp=3"]) == 3
    assert "tp=3" in capsys.readouterr().err
