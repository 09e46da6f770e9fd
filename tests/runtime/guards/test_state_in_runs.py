"""State that forwards change in whole runs: named, put back after trials, or refused; modes of evaluation."""

import copy
import io
from array import array
from contextvars import Context, ContextVar
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import quintsched as qs

from ...helpers.training import require_equal, train_alone, train_ranks
from ..trials import ones, sgd, taken
from .late_layers import Layer, losses


def averaged(layer):
    if layer.training:
        with torch.no_grad():
            for slow, fast in zip(layer.slow.parameters(), layer.fc.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
    return layer.slow.weight.sum()


def test_a_teacher_that_is_a_copy_at_first_is_named_in_a_run(named):
    layer = Layer(averaged)
    layer.slow = copy.deepcopy(layer.fc).requires_grad_(False)
    losses(layer, steps=6)
    assert named() == ["block 1 (Layer).slow.weight, block 1 (Layer).slow.bias"]


def appended(layer):
    layer.held.append(1)
    return 1 / len(layer.held)


def written(layer):
    layer.held.write("x" if isinstance(layer.held, io.StringIO) else b"x")
    return 1 / layer.held.tell()


HELD = {
    "array": (appended, array("l")),
    "bytearray": (appended, bytearray()),
    "text": (written, io.StringIO()),
    "bytes": (written, io.BytesIO()),
}


@pytest.mark.parametrize(("does", "held"), HELD.values(), ids=HELD)
def test_trials_put_back_what_is_in_memory(does, held):
    def count(layer):
        layer.held += 1
        return 1 / layer.held

    layers = []
    for what, memory in ((does, held), (count, 0)):
        torch.manual_seed(0)
        layers.append(Layer(what, held=memory))
    assert losses(layers[0], microbatches=1) == losses(layers[1], microbatches=1)


def next_of(layer):
    if layer.held is None:
        layer.held = iter([1.0] * 100)
    return next(layer.held)


def queued(layer):
    layer.held.put(1)
    return 1 / layer.held.qsize()


@pytest.mark.parametrize(("does", "held"), [(next_of, None), (queued, SimpleQueue())])
def test_what_cannot_be_put_back_is_refused_when_it_is_made_too(does, held):
    with pytest.raises(qs.MisfitError, match=r"block 1 \(Layer\) goes by .*\.held, a .*cannot be put back"):
        losses(Layer(does, held=held))


FACTOR = ContextVar("factor", default=0.0)


class Contextual(nn.Module):
    """Hands on through a context variable what its next forward goes by."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x):
        h, factor = torch.tanh(self.fc1(x)), FACTOR.get()
        FACTOR.set(h.detach().mean())
        return x + self.fc2(h) * (1 + factor)


@pytest.mark.parametrize("mesh", ["pp=1", "tp=2"])
def test_what_trials_put_into_context_variables_is_gone(mesh):
    numbers = [torch.randn(4, 3, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    given = [Contextual()], nn.functional.mse_loss, sgd, list(zip(numbers[:3], numbers[3:], strict=True))
    ranks = train_ranks(qs.compile("1f1b", mesh=mesh, microbatches=1), *given)
    require_equal(ranks, Context().run(lambda: train_alone(*given, dtype=torch.float32)), 1e-5)


def test_one_rank_says_it_once(caplog):
    taken([nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval() for _ in range(2)], ones(2, 2, steps=2))
    (said,) = [record.message for record in caplog.records if "eval mode" in record.message]
    assert "call model.train()" in said
