"""Models that are split: a traced one, one with a list of layers, and nanoGPT; between their layers is code of a test.

made(Walked, middle)    a Walked whose `middle(self, x)` runs between its layers
check(model, change)    trains it on a mesh and in one process, where a loop calls `change(model)` after each step
"""

from functools import partial

import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import split

from ...helpers.training import check_equality

WIDTH = 4
IDS, HIDDEN = 11, 8


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class Traced(nn.Module):
    """Three attributes and no list: found by tracing. `middle` is between its modules."""

    def __init__(self):
        super().__init__()
        self.stem, self.teacher, self.head = nn.Linear(3, WIDTH), Block(), nn.Linear(WIDTH, 2)
        self.make_layers()
        self.tau, self.count, self.flag, self.last, self.options = 1.0, 0, True, None, {"tau": 1.0}
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def make_layers(self):
        self.first, self.second = Block(), Block()

    def middle(self, x):
        return x

    def forward(self, x):
        return self.head(self.second(self.middle(self.first(self.stem(x)))))


class Walked(Traced):
    """The same with a list of layers, of which an example is given."""

    def make_layers(self):
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.middle(layer(x))
        return self.head(x)


KINDS = [Traced, Walked]


def made(kind, middle, dtype=torch.float64):
    torch.manual_seed(0)
    model = type(kind.__name__, (kind,), {"middle": middle, "__module__": __name__})().to(dtype)
    for layer in (model.teacher, model.head):
        nn.init.normal_(layer.fc2.weight if layer is model.teacher else layer.weight, std=0.2)
    return model


def inputs(dtype=torch.float64):
    return torch.randn(8, 3, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss(output, targets):
    return (output.flatten(1).sum(1) - targets).square().sum(), len(targets)


sgd = partial(torch.optim.SGD, lr=0.003)


def nothing(model):
    pass


def check(model, change=nothing, mesh="pp=2", steps=3, **how):
    x = inputs(next(model.parameters()).dtype)
    example = x[:2] if isinstance(model, Walked) else None
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4 // (2 if "dp" in mesh else 1))
    how = {"tolerance": 1e-10, "dtype": x.dtype, "cut": lambda own: split(own, example=example), **how}
    batches = [(x, x[:, 0, 0])] * steps
    check_equality(plan, model, loss, sgd, batches, microbatches=4, after=lambda own, _: change(own), **how)


class Layer(nn.Module):
    """A residual MLP whose input is scaled."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x, scale):
        return x + scale * self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class NanoGPT(nn.Module):
    """As nanoGPT has it: a dictionary of modules, a head that is the embedding, and code between all of them."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(IDS, HIDDEN),
                "wpe": nn.Embedding(16, HIDDEN),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([layer() for _ in range(3)]),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, IDS, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, idx, targets=None):
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x, idx.gt(3)[..., None].to(x.dtype))
        x = self.transformer.ln_f(x) * self.scale
        return self.lm_head(x), None


def require_chain(blocks, model, x):
    """Blocks in a row give the numbers of the model."""
    expected = model(x)
    for block in blocks:
        x = block(x)
    assert torch.equal(x, expected)
