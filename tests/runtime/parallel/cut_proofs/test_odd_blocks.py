"""Odd blocks give the numbers of one process on every mesh that cuts them, or are refused in the first step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.autograd.kv_store import Past
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.comm.connection import connect_for
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.context.context_parallel import Context
from quintsched.runtime.parallel.tensor.column_row_layers import ColumnParallelLinear
from tests.compiling import torch_compiles

from ....helpers.commands import run as run_command
from ...test_matrix_processes import ROOT
from ...toys import sgd
from .odd_attentions import PerHeadNorms, Turned, WideNorms
from .odd_blocks import BLIND, COUNTING, ODD, PAIRED
from .odd_mlps import TOKENS, WIDTH, ChosenMixture, FusedExperts, Mixture, SoftmaxBetween

X, Y = (torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (1, 2))


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.tensor(targets.numel() / WIDTH, dtype=torch.float64)
    return (output - targets).square().sum(), weight


def train(
    transport: Transport, mesh: str, blocks: Sequence[type[nn.Module]], schedule: str = "gpipe", **more: Any
) -> tuple[Mapping[str, Tensor], bool]:
    """Return the weights after two steps, and whether the first block has pairs that are cut."""
    options = {"slices": more.pop("slices")} if "slices" in more else {}
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, **options)
    engine = Engine(plan, blocks, loss, sgd, dtype=torch.float64, transport=transport, **more)
    for _ in range(2):
        engine.step(X, Y)
    modules = (module for stage in engine.stages.values() for module in stage.modules())
    in_pairs = any(isinstance(module, ColumnParallelLinear) and module.pair is not None for module in modules)
    return engine.full_weights(), in_pairs


@cache
def alone(block: type[nn.Module]) -> Mapping[str, Tensor]:
    return run_local(1, lambda transport: train(transport, "pp=1", [block]))[0][0]


def is_equal(blocks: Sequence[type[nn.Module]], mesh: str, **more: Any) -> tuple[bool, bool]:
    """Return whether blocks ran on a mesh, and whether in pairs; what ran has to be equal."""
    try:
        ranks = run_local(qs.Mesh.parse(mesh).size, lambda transport: train(transport, mesh, blocks, **more))
    except MisfitError as error:
        if "block 0 " not in str(error):
            raise
        return False, False
    weights = {name: weight for of_rank, _ in ranks for name, weight in of_rank.items()}
    for name, weight in alone(blocks[0]).items():
        assert (weights[name] - weight).abs().max() <= 1e-9 * max(1.0, float(weight.abs().max())), name
    return True, any(in_pairs for _, in_pairs in ranks)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("block", ODD)
def test_over_tp(block: type[nn.Module]) -> None:
    ran, in_pairs = is_equal([block], "tp=2")
    assert ran
    if block in PAIRED:
        assert in_pairs


@pytest.mark.slow
@pytest.mark.parametrize("block", ODD)
@pytest.mark.parametrize(("mesh", "more"), [("tp=4", {}), ("tp=2", {"sequence_parallel": True})])
def test_over_other_meshes(block: type[nn.Module], mesh: str, more: dict[str, Any]) -> None:
    ran, _ = is_equal([block], mesh, **more)
    assert ran


@pytest.mark.slow
@torch_compiles
def test_what_is_proved_may_be_compiled() -> None:
    assert is_equal([WideNorms], "tp=2", compiled=True)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_short_types_are_cut_alike(dtype: torch.dtype) -> None:
    plan = qs.compile("gpipe", mesh="tp=2", microbatches=1)

    def run(transport: Transport) -> str | None:
        blocks = [PerHeadNorms, SoftmaxBetween, Mixture]
        engine = Engine(plan, blocks, loss, sgd, dtype=dtype, transport=transport)
        engine.step(X, Y)
        return engine.tensor_cuts

    pairs = ", ".join(["0.q_proj", *(f"2.experts.{number}.fc1" for number in range(4))])
    proved = f"pairs proved at all numbers: {pairs}"
    whole = "whole: 2.gate; in no pair, so that a rule has to cut them, rules={'*.gate': 'column'}: 2.gate"
    said = f"tp=2 cuts 22 of 45 weights; {whole}; {proved}; one by one: 1.fc1, 1.fc2"
    assert run_local(2, run)[0] == said


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, _, err = run_command(sys.executable, *torchrun, "-m", __name__, str(tmp_path), timeout_s=100)
    assert code == 0, err
    for block in PROCESSES:
        found = torch.load(tmp_path / f"{block.__name__}.pt")
        for name, weight in alone(block).items():
            assert (found[name] - weight).abs().max() <= 1e-9 * max(1.0, float(weight.abs().max())), name


PROCESSES = (PerHeadNorms, WideNorms, SoftmaxBetween, Turned)


def main(folder: Path) -> None:
    """Train on one rank of two."""
    dist.init_process_group("gloo")
    for block in PROCESSES:
        plan = qs.compile("gpipe", mesh="tp=2", microbatches=2)
        transport = connect_for(plan, 60)
        weights, _ = train(transport, "tp=2", [block])
        if transport.rank == 0:
            torch.save(weights, folder / f"{block.__name__}.pt")
    dist.destroy_process_group()


class Anchor(nn.Module):
    """Takes what sequences that are cut need, so that nobody says that no block does."""

    def forward(self, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        return x


@pytest.mark.slow
@pytest.mark.parametrize("block", ODD)
@pytest.mark.parametrize(
    ("mesh", "more"), [("cp=2", {}), ("cp=2,tp=2", {}), ("pp=2", {"schedule": "seq-1f1b", "slices": 2})]
)
def test_where_sequences_are_cut(block: type[nn.Module], mesh: str, more: dict[str, Any]) -> None:
    counts = block in COUNTING and "slices" in more
    assert is_equal([block, Anchor], mesh, **more)[0] == (block not in BLIND and not counts)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mesh", ["ep=2", "ep=2,tp=2"])
@pytest.mark.parametrize("block", [Mixture, ChosenMixture, FusedExperts])
def test_experts_of_others_are_replicas_over_ep_and_named(
    block: type[nn.Module], mesh: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = qs.compile("gpipe", mesh=mesh, microbatches=1)

    def run(transport: Transport) -> tuple[Mapping[str, Tensor], str | None]:
        engine = Engine(plan, [block], loss, sgd, dtype=torch.float64, transport=transport)
        share = slice(2 * engine.replica, 2 * engine.replica + 2)
        for _ in range(2):
            engine.step(X[share], Y[share])
        return engine.full_weights(), engine.expert_shares

    for weights, said in run_local(plan.mesh.size, run):
        for name, weight in alone(block).items():
            assert (weights[name] - weight).abs().max() <= 1e-9 * max(1.0, float(weight.abs().max())), name
        assert str(said).startswith("ep=2 shares out no experts; on all ranks alike, as over dp: 0.experts (")
    assert "shares out no experts" in caplog.text


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
