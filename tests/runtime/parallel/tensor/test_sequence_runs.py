"""Runs with tokens shared out over tp: images, masks of dropouts within and beside pairs, blocks that are modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.vit import ViTOptions, vit

from ...toys import Task, ids_task, tiny_vit, train_on
from ..expert.moe_training import require_equality
from ..lively import LENGTH, LLAMA, lively_gpt


def test_a_vision_transformer_where_its_tokens_divide() -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randn(2, 8, 1, 12, 4, generator=random, dtype=torch.float64)
    task = Task(images, torch.randint(0, 10, (2, 8), generator=random))
    options = ViTOptions(hidden=12, depth=2, heads=4, patch=4)
    blocks = vit(DataSpec(input_shape=(1, 12, 4), num_classes=10), options)  # three patches and the class token
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)
    require_equality(plan, {"sequence_parallel": True}, blocks=blocks, task=task)
    task = Task.make(2, 8, torch.float64)
    with pytest.raises(MisfitError, match=r"over tp=2, but block 0 leaves float64 \(4, 17, 16\), which does not div"):
        train_on(qs.compile("1f1b", mesh="tp=2", microbatches=2), task, tiny_vit(), sequence_parallel=True)


class Dropping(nn.Module):
    """An MLP that drops out before its pair, between the two, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.before, self.between, self.behind = nn.Dropout(0.2), nn.Dropout(0.3), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.behind(self.fc2(self.between(self.fc1(self.before(x)).relu())))
        return out


class Deep(Dropping):
    """One whose dropout between the two stands deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.2))  # type: ignore[assignment]


class Beside(Dropping):
    """One with a product of its own behind the pair, whose features are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.before(self.beside(super().forward(x)))
        return out


@pytest.mark.parametrize(
    ("block", "sequence_parallel"),
    [
        (Dropping, True),
        (Beside, False),
        *(pytest.param(Deep, shares, marks=pytest.mark.slow) for shares in (True, False)),
    ],
)
def test_masks_belong_to_the_features_between_a_pair_only(block: type[nn.Module], sequence_parallel: bool) -> None:
    blocks = [*lively_gpt(dropout=0.3)[:-1], block, lively_gpt()[-1]]
    rules = {"*.beside": "column"} if block is Beside else {}
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=2)
    more = {"sequence_parallel": sequence_parallel, "rules": rules}
    require_equality(plan, more, blocks=blocks, task=ids_task(2, 8, LENGTH))


def test_blocks_that_are_modules_are_outlined_before_they_are_cut() -> None:
    blocks = [build_block(block, number, 0, torch.float64) for number, block in enumerate(lively_gpt(**LLAMA))]
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)
    require_equality(plan, {"sequence_parallel": True}, blocks=blocks, task=ids_task(2, 8, LENGTH))
