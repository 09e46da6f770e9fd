"""A model that comes in eval mode is said to train so, once, where that makes a difference."""

import pytest
import torch
from torch import nn

from quintsched.runtime.guards.state_changed_by_forwards import eval_mode_warning

from ..trials import engine_of, ones, taken


class Attention(nn.Linear):
    attention_dropout: float

    def __init__(self):
        super().__init__(2, 2)
        self.attention_dropout = 0.1


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([nn.Dropout(0.2)], "Dropout, p=0.2"),
        ([nn.Linear(2, 2), Attention()], "Attention, attention_dropout=0.1"),
        ([nn.BatchNorm1d(2)], "running statistics of BatchNorm1d"),
        ([nn.Linear(2, 2), nn.Dropout(0.0), nn.LayerNorm(2)], None),
        ([nn.BatchNorm1d(2, track_running_stats=False)], None),
        ([], None),
    ],
)
def test_what_eval_mode_leaves_out_is_named(modules, said):
    blocks = [nn.Sequential(*modules).eval()]
    found = eval_mode_warning(blocks)
    assert found is None if said is None else said in found
    assert eval_mode_warning([*blocks, nn.Linear(2, 2)]) is None  # some of it trains: frozen by intent


def test_one_rank_says_it_once(caplog):
    taken([nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval() for _ in range(2)], ones(2, 2, steps=2))
    (said,) = [record.message for record in caplog.records if "eval mode" in record.message]
    assert "call model.train()" in said


class Merged(nn.Linear):
    """Low-rank weights that are merged into the whole ones where the layer does not train, as loralib does."""

    def __init__(self):
        super().__init__(2, 2)
        self.low, self.merged = nn.Parameter(torch.ones(1, 2)), False

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.low.T @ self.low

    def train(self, mode=True):
        if mode is self.merged:
            self.weight.data += (-1 if mode else 1) * self.low.data.T @ self.low.data
            self.merged = not mode
        return super().train(mode)


def test_an_evaluation_ends_by_the_train_of_a_module():
    layer, frozen = Merged(), Merged().eval()
    engine = engine_of(None, [layer, nn.Sequential(frozen)], mesh="dp=1", microbatches=1)
    x = torch.ones(2, 2)
    before = engine.step(x, x).loss
    after = engine.evaluate(x, x).loss
    assert not layer.merged
    assert frozen.merged
    assert [layer.training, frozen.training] == [True, False]
    assert engine.step(x, x).loss == pytest.approx(float(after))
    assert after < before
