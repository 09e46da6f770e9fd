import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quintsched.errors import UsageError
from quintsched.runtime.blocks.block_builders import build_model, undecayed_weights
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_tied
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.runtime.settings.optimizer_settings import OPTIMIZERS, LearningRateConfig, OptimizerConfig
from quintsched.runtime.train.job_optimizer_and_lr_schedule import (
    build_optimizer,
    learning_rate_factor,
    set_learning_rate,
)


@pytest.mark.parametrize(
    ("settings", "usual"),
    [
        ({"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}, {}),
        ({"name": "adam", "lr": 0.5, "betas": (0.1, 0.2)}, {"weight_decay": 0.0}),
        ({"name": "adamw", "weight_decay": 0.1}, {"betas": (0.9, 0.999)}),
    ],
)
def test_settings_are_those_of_torchs_optimizers(settings: dict[str, Any], usual: dict[str, object]) -> None:
    optimizer = build_optimizer(OptimizerConfig(**settings), nn.Linear(2, 2).named_parameters())
    assert type(optimizer).__name__.lower() == settings.pop("name")
    group = optimizer.param_groups[0]
    assert group.items() >= (settings | usual | {"foreach": True}).items()


def test_decay_spares_what_it_is_told() -> None:
    config = OptimizerConfig(name="adamw", lr=0.5, weight_decay=0.1, decay="matrices")
    layer = nn.Linear(2, 2)
    before = {key: weight.detach().clone() for key, weight in layer.named_parameters()}
    optimizer = build_optimizer(config, layer.named_parameters(), {"bias"})
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(layer.bias, before["bias"])
    assert not torch.equal(layer.weight, before["weight"])


def test_what_decay_spares_in_the_built_in_models() -> None:
    text, images = DataSpec(input_shape=(8,), num_classes=5), DataSpec(input_shape=(1, 8, 8), num_classes=5)
    untied, tied = (GPTOptions(depth=1, norm="rmsnorm", activation="swiglu", tied=tied) for tied in (False, True))
    matrices = {f"1.{name}.weight" for name in ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.fc2")}
    for options, expected in ((untied, {*matrices, "2.head.weight"}), (tied, matrices)):
        blocks = gpt(text, options)
        names = {name for name, _ in build_model(blocks).named_parameters()}
        assert names - undecayed_weights(blocks, gpt_tied(options)) == expected
    blocks = vit(images, ViTOptions(depth=1))
    names = {name for name, _ in build_model(blocks).named_parameters()}
    decayed = {f"1.{name}.weight" for name in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")}
    assert names - undecayed_weights(blocks, {}) == decayed | {"0.proj.weight", "2.fc.weight"}


def test_decay_spares_a_shared_embedding_under_whatever_name() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)
            self.ids = nn.Embedding(4, 3)
            self.ids.weight = self.head.weight

    assert undecayed_weights([Lookup], {}) == {"0.head.weight", "0.head.bias"}


def test_every_class_of_torch_that_needs_no_closure_is_known() -> None:
    found = {name.lower() for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert set(OPTIMIZERS) <= found | {"muon"}
    assert found - set(OPTIMIZERS) == {"optimizer", "lbfgs", "sparseadam"}


def test_groups_have_options_and_rates_of_their_own() -> None:
    config = OptimizerConfig.model_validate(
        {
            "name": "adamw",
            "lr": 0.1,
            "weight_decay": 0.2,
            "options": {"amsgrad": True},
            "groups": [
                {"params": "*.bias", "weight_decay": 0.0, "options": {"amsgrad": False}},
                {"params": ["0.*"], "lr": 0.01},
            ],
        }
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(config, model.named_parameters())
    found = [(group["lr"], group["weight_decay"], group["amsgrad"]) for group in optimizer.param_groups]
    assert found == [(0.1, 0.2, True), (0.1, 0.0, False), (0.01, 0.2, True)]
    set_learning_rate([optimizer], 0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05, 0.005])


def test_what_a_class_does_not_take_is_said() -> None:
    for settings, words in (
        ({"options": {"amsgrd": True}}, "train.optimizer.options: adam takes no 'amsgrd'; did you mean 'amsgrad'"),
        ({"groups": [{"params": "*", "options": {"beta": 1}}]}, "groups.0.options: adam takes no 'beta'"),
        ({"name": "quintsched.nothing:Class"}, "No module named 'quintsched.nothing'"),
        ({"options": {"eps": -1}}, "train.optimizer: adam: Invalid epsilon value: -1"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            build_optimizer(OptimizerConfig.model_validate(settings), nn.Linear(2, 2).named_parameters())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "constant", "warmup_steps": 2}, [0.5, *[1.0] * 9]),
        ({"name": "linear", "warmup_steps": 2, "min_factor": 0.2}, [0.5, 1, *[1 - k / 10 for k in range(8)]]),
        ({"name": "cosine", "min_factor": 0.2}, [0.6 + 0.4 * math.cos(math.pi * k / 10) for k in range(10)]),
        ({"name": "polynomial", "power": 2.0}, [1.0, 0.81, 0.64, 0.49, 0.36, 0.25, 0.16, 0.09, 0.04, 0.01]),
        ({"name": "exponential", "min_factor": 0.01}, [0.01 ** (k / 10) for k in range(10)]),
        ({"name": "inverse_sqrt", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, *(2 / k**0.5 for k in range(5, 11))]),
        ({"name": "wsd", "decay_steps": 4}, [1.0] * 7 + [0.75, 0.5, 0.25]),
        ({"name": "wsd", "warmup_steps": 2, "min_factor": 0.5, "decay_steps": 2}, [0.5, *[1.0] * 8, 0.75]),
    ],
)
def test_shapes_of_learning_rates(settings: dict[str, object], expected: list[float]) -> None:
    schedule = LearningRateConfig.model_validate(settings)
    assert [learning_rate_factor(schedule, step, 10) for step in range(10)] == pytest.approx(expected)


def test_a_factor_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(step, total):\n    return 0.5 * step / total\nword = 'x'\ndef one(step): return 1\n"
    )
    name = f"{tmp_path / 'mine.py'}:half"
    assert learning_rate_factor(LearningRateConfig(name=name), 5, 10) == 0.25
    with pytest.raises(UsageError, match="word is a str, not a function"):
        learning_rate_factor(LearningRateConfig(name=f"{tmp_path / 'mine.py'}:word"), 5, 10)
    with pytest.raises(UsageError, match=r"one\(step\): too many positional arguments"):
        learning_rate_factor(LearningRateConfig(name=f"{tmp_path / 'mine.py'}:one"), 5, 10)
