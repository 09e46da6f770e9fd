"""Odd blocks give the numbers of one process on every mesh that cuts them, or are refused in the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.autograd.kv_store import Past
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.context.context import Context
from quintsched.runtime.parallel.tensor.layers import ColumnParallelLinear

from ..toys import sgd
from .odd_blocks import BLIND, COUNTING, ODD, PAIRED, TOKENS, WIDTH

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
