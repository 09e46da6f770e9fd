from typing import Literal, TypeAlias, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quintsched.runtime.config import LearningRateConfig, OptimizerConfig
from quintsched.runtime.optim import build_optimizer, learning_rate_factor

Shape: TypeAlias = Literal["constant", "linear", "cosine"]


@pytest.mark.parametrize("name", get_args(Shape))
@settings(deadline=None)
@given(warmup=st.integers(0, 20), total=st.integers(1, 60), min_factor=st.floats(0, 1))
def test_up_then_down_within_bounds(name: Shape, warmup: int, total: int, min_factor: float) -> None:
    schedule = LearningRateConfig(name=name, warmup_steps=warmup, min_factor=min_factor)
    factors = [learning_rate_factor(schedule, step, total) for step in range(total + 5)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    rise, fall = factors[:warmup], factors[warmup:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    if warmup < total:
        assert fall[0] == pytest.approx(1)
        assert factors[total] == pytest.approx(1 if name == "constant" else min_factor)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1, 1, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_shapes(name: Shape, expected: list[float]) -> None:
    schedule = LearningRateConfig(name=name, warmup_steps=2, min_factor=0.2)
    factors = [learning_rate_factor(schedule, step, total_steps=6) for step in range(7)]
    assert factors == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "kind", "settings"),
    [
        (
            OptimizerConfig(name="sgd", lr=0.5, momentum=0.9, weight_decay=0.1),
            torch.optim.SGD,
            {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1},
        ),
        (
            OptimizerConfig(name="adam", lr=0.5, betas=(0.1, 0.2)),
            torch.optim.Adam,
            {"lr": 0.5, "betas": (0.1, 0.2), "weight_decay": 0.0},
        ),
        (
            OptimizerConfig(name="adamw", lr=0.5, weight_decay=0.1),
            torch.optim.AdamW,
            {"lr": 0.5, "betas": (0.9, 0.999), "weight_decay": 0.1},
        ),
    ],
)
def test_torchs_optimizers(config: OptimizerConfig, kind: type, settings: dict[str, object]) -> None:
    layer = nn.Linear(2, 2)
    optimizer = build_optimizer(config, layer.named_parameters())
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert group["foreach"] is True
    assert {key: group[key] for key in settings} == settings
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
