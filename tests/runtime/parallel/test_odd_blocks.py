"""Odd blocks give the numbers of one process on every mesh that cuts them, or are refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.tensor.layers import ColumnParallelLinear

from ..toys import sgd
from .odd_blocks import ODD, PAIRED, TOKENS, WIDTH, Attention, Mlp

X, Y = (torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (1, 2))


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.tensor(targets.numel() / WIDTH, dtype=torch.float64)
    return (output - targets).square().sum(), weight


def train(transport: Transport, mesh: str, block: type[nn.Module], **more: Any) -> tuple[Mapping[str, Tensor], bool]:
    """Return the weights after two steps, and whether the block has pairs that are cut."""
    plan = qs.compile("gpipe", mesh=mesh, microbatches=2)
    engine = Engine(plan, [block], loss, sgd, dtype=torch.float64, transport=transport, **more)
    for _ in range(2):
        engine.step(X, Y)
    return engine.full_weights(), any(
        isinstance(module, ColumnParallelLinear) and module.pair is not None
        for module in engine.stages[0].modules()
    )


@cache
def alone(block: type[nn.Module]) -> Mapping[str, Tensor]:
    return run_local(1, lambda transport: train(transport, "pp=1", block))[0][0]


def is_equal(block: type[nn.Module], mesh: str, **more: Any) -> tuple[bool, bool]:
    """Return whether a block ran on a mesh, and whether in pairs; what ran has to be equal."""
    try:
        ranks = run_local(qs.Mesh.parse(mesh).size, lambda transport: train(transport, mesh, block, **more))
    except MisfitError as error:
        assert "block 0" in str(error) or "no block takes `context`" in str(error), error
        return False, False
    expected = alone(block)
    for weights, _ in ranks:
        for name, weight in expected.items():
            assert (weights[name] - weight).abs().max() <= 1e-9 * max(1.0, float(weight.abs().max())), name
    return True, ranks[0][1]


@pytest.mark.parametrize("block", ODD)
def test_over_tp(block: type[nn.Module]) -> None:
    ran, in_pairs = is_equal(block, "tp=2")
    assert ran
    if block in PAIRED:
        assert in_pairs


@pytest.mark.slow
@pytest.mark.parametrize("block", ODD)
@pytest.mark.parametrize(
    ("mesh", "more"), [("tp=4", {}), ("tp=2", {"sequence_parallel": True}), ("tp=2", {"compiled": False, "clip": 1.0})]
)
def test_over_other_meshes(block: type[nn.Module], mesh: str, more: dict[str, Any]) -> None:
    ran, _ = is_equal(block, mesh, **more)
    assert ran
