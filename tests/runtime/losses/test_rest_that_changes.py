"""Losses that go by what belongs to no sample and is another in each step: compared in the step where it matters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import SumOfMeans

from ...helpers.training import require_equal, sgd, train_alone, train_ranks


class Uncertain(nn.Module):
    """Gives an output, and log-variances that are 0 at first."""

    def __init__(self):
        super().__init__()
        self.fc, self.s = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return {"y": self.fc(x), "s": self.s}


class Centred(nn.Module):
    """Gives logits, features, and one centre of features for each of some classes."""

    def __init__(self, classes):
        super().__init__()
        self.fc, self.centres = nn.Linear(4, 3), nn.Parameter(torch.randn(classes, 4))

    def forward(self, x):
        return self.fc(x), x, self.centres


def batch(step, sizes):
    random = torch.Generator().manual_seed(step)
    numbers = torch.randn(sizes[step], 7, generator=random, dtype=torch.float64)
    return numbers[:, :4], numbers[:, 4:]


def train(head, loss, targets_of, mesh, microbatches, sizes):
    """Train on a mesh, and require losses and weights of one process."""
    torch.manual_seed(0)
    blocks = [nn.Linear(4, 4).double(), head().double()]
    batches = [(x, targets_of(y, step)) for step in range(len(sizes)) for x, y in [batch(step, sizes)]]
    plan = qs.compile("gpipe", mesh=mesh, microbatches=microbatches)
    require_equal(train_ranks(plan, blocks, loss, sgd, batches), train_alone(blocks, loss, sgd, batches))


MESHES = [("pp=2", 2), ("dp=2", 1), ("dp=2,pp=2", 2)]


def beside(y, step):
    return {"y": y, "a": torch.tensor(float(step))}


def alone(y, step):
    return y


REFUSED = {
    "added to a sum": lambda o, t: F.mse_loss(o, t["y"], reduction="sum") + 5 * t["a"],
    "times a root": lambda o, t: F.mse_loss(o, t["y"]) + t["a"] * F.mse_loss(o, t["y"]).sqrt(),
}


@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_the_first_step_that_is_not_as_found(loss, mesh, microbatches):
    with pytest.raises(qs.MisfitError, match=r"in step 1 it is not so|since a number among the targets has changed"):
        train(lambda: nn.Linear(4, 3), loss, beside, mesh, microbatches, [8] * 3)


UNSEEN_AT_FIRST = {
    "its value is 0": lambda o, t: ((-o["s"]).exp() * (o["y"] - t) ** 2).sum() + o["s"].sum(),
    "its gradient too": lambda o, t: ((o["y"] + o["s"] - t) ** 2).sum() + 5 * o["s"].square().sum(),
    "of a sum with its weight": lambda o, t: (((o["y"] + o["s"] - t) ** 2).sum() + o["s"].square().sum(), len(t)),
    "a factor of what samples share": lambda o, t: F.mse_loss(o["y"] + o["s"], t) + o["s"].sum() * o["y"].std(),
    "a term alone": SumOfMeans(
        (lambda o, t: ((-o["s"]).exp() * (o["y"] - t) ** 2).sum(), lambda t: torch.tensor(len(t))),
        (lambda o, t: o["s"].exp().sum(), lambda t: torch.tensor(len(t))),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("loss", UNSEEN_AT_FIRST.values(), ids=UNSEEN_AT_FIRST)
def test_terms_that_begin_at_nothing_are_seen_before_weights_change(loss, mesh, microbatches):
    with pytest.raises(qs.MisfitError, match=r"belongs to no sample|depends on the other samples"):
        train(Uncertain, loss, alone, mesh, microbatches, [8])


@pytest.mark.parametrize("classes", [5, 6, 7, 9])
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
def test_rows_of_no_sample_are_none_whatever_the_number_of_samples(mesh, microbatches, classes):
    def loss(output, y):
        logits, features, centres = output
        kind = y.argmax(1)
        return F.cross_entropy(logits, kind) + 0.1 * (features - centres[kind]).square().sum(1).mean()

    train(lambda: Centred(classes), loss, alone, mesh, microbatches, [8, 8, 8, 5])
