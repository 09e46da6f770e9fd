"""Losses and metrics over slices of sequences: equal to one process where tokens are by themselves, else refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, run_local

from ..trials import sgd

PLANS = {
    "cp": qs.compile("gpipe", mesh="cp=2", microbatches=2),
    "slices": qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=2),
}


class Token(nn.Linear):
    def forward(self, x: Tensor, past: object = None, context: object = None) -> Tensor:
        return super().forward(x)


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Token(4, 5).double(), Token(5, 3).double()]


def batch(length: int, *, ids: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, length, 4, generator=generator, dtype=torch.float64)
    targets = torch.randn(4, length, 3, generator=generator, dtype=torch.float64)
    return inputs, targets.argmax(-1) if ids else targets


def run(plan, loss, metric=None, length=16, *, ids=False):
    """Return the loss of a step, and the metric, of slices and of one process."""
    own, (inputs, targets) = blocks(), batch(length, ids=ids)
    output = nn.Sequential(*own)(inputs).detach()
    expected = [f(output, targets) for f in (loss, *([metric] if metric else []))]
    metrics = {"m": metric} if metric else None

    def train(transport):
        engine = Engine(plan, copy.deepcopy(own), loss, sgd, metrics=metrics, transport=transport)
        result = engine.step(inputs, targets)
        return [float(result.loss), *map(float, result.metrics.values())]

    whole = [float(one[0] / one[1] if isinstance(one, tuple) else one) for one in expected]
    return run_local(plan.mesh.size, train)[0], whole


MIXED = {
    "differences": lambda o, t: F.mse_loss(o, t) + o.diff(dim=1).square().mean(),
    "differences alone": lambda o, t: F.mse_loss(o[:, 1:] - o[:, :-1], t[:, 1:] - t[:, :-1]),
    "second differences": lambda o, t: F.mse_loss(o, t) + o.diff(n=2, dim=1).square().mean(),
    "four ahead": lambda o, t: F.mse_loss(o[:, :-4], t[:, 4:]),
    "windows": lambda o, t: F.mse_loss(F.avg_pool1d(o.mT, 8), F.avg_pool1d(t.mT, 8)),
    "beyond a threshold": lambda o, t: F.mse_loss(o, t) + F.relu(o.diff(dim=1).abs() - 6).sum() / o.numel(),
    "a sum": lambda o, t: ((o - t).square().sum() + o.diff(dim=1).abs().sum(), o.numel()),
}
APART = {
    "mean": F.mse_loss,
    "sum": lambda o, t: (o - t).abs().sum(),
    "sum and weight": lambda o, t: ((o - t).square().sum(), o.numel()),
}
OF_IDS = {
    "classes": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
    "weighed": lambda o, t: F.cross_entropy(o.mT, t, weight=WEIGHTS),
}
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("plan", PLANS)
def test_losses_of_several_tokens_are_refused(plan, name):
    with pytest.raises(qs.MisfitError, match="slices"):
        run(PLANS[plan], MIXED[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*APART, *OF_IDS])
@pytest.mark.parametrize("plan", PLANS)
def test_losses_of_tokens_are_those_of_one_process(plan, name):
    found, expected = run(PLANS[plan], (APART | OF_IDS)[name], ids=name in OF_IDS)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS)
def test_metrics(plan):
    right = lambda o, t: (o.argmax(-1) == t).double().mean()  # noqa: E731
    found, expected = run(PLANS[plan], OF_IDS["classes"], right, ids=True)
    assert found == pytest.approx(expected, rel=1e-12)
    for mixed in (lambda o, t: o.diff(n=2, dim=1).abs().mean(), lambda o, t: (o.argmax(-1) == t).all(1).double().sum()):
        with pytest.raises(qs.MisfitError, match="metric 'm' is not that of the batch"):
            run(PLANS[plan], OF_IDS["classes"], mixed, ids=True)
