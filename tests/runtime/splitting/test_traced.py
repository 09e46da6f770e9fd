"""Models that are traced: the chain of their segments is the model, while it trains and while it does not."""

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import split
from quintsched.runtime.splitting.split_proof import chain

from ...helpers.training import check_equality
from .models import WIDTH, Block, loss, sgd


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.widen = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        return self.blocks(self.widen(x))


class Vision(nn.Module):
    """As timm has it: a stem, a weight beside it, stages in stages, and two heads that differ once it is trained."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.places = nn.Parameter(torch.randn(3, WIDTH))
        self.stages = nn.Sequential(Stage(2), Stage(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head, self.other = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, mask=None):
        x = self.stem(x) + self.places
        x = x if mask is None else x * mask
        x = self.norm(self.stages(x)).mean(1)
        return self.head(x) + self.other(x) if self.training else (self.head(x) + self.other(x)) / 2


class TwoWays(nn.Module):
    """Two values cross every cut."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.ModuleList([Block() for _ in range(3)]), nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        y = x.flip(1)
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y) + 0.5 * x
        return x * y


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, told):
        return {"x": self.block(told["x"]), "count": told["count"] + 1, "sum": told["sum"] + told["x"].mean()}


class Dicts(nn.Module):
    """Its layers pass a dictionary, of which one value is a number of Python's."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Telling() for _ in range(3)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        told = {"x": x, "count": 0, "sum": x.mean()}
        for layer in self.layers:
            told = layer(told)
        return self.head(told["x"]) * told["count"] + told["sum"]


def drawn(kind):
    torch.manual_seed(0)
    return kind().double()


def inputs(width=3):
    return torch.randn(8, 3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("training", [True, False])
def test_the_chain_is_the_model_and_every_weight_has_its_name(training):
    model = drawn(Vision).train(training)
    parts = split(model)
    assert len(parts) == 10
    assert torch.equal(chain([part.train(training) for part in parts], inputs()), model(inputs()))
    assert sum(name.startswith("stages.") and name.endswith("fc1.weight") for name in parts.own_names.values()) == 5
    assert {*parts.own_names.values()} == set(model.state_dict())
    assert all(name.partition(".")[2] == own for name, own in parts.own_names.items())


@pytest.mark.parametrize(("kind", "width"), [(Vision, 3), (TwoWays, WIDTH), (Dicts, WIDTH)])
def test_it_trains_as_in_one_piece(kind, width):
    model, batch = drawn(kind), inputs(width)
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=4)
    check_equality(plan, model, loss, sgd, [(batch, batch[:, 0, 0])], microbatches=4, cut=split)
