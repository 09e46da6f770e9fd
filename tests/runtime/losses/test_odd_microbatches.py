"""Losses whose first microbatches tell little, or of which one weighs nothing: as of the whole batch, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs

from ...helpers.training import require_equal, sgd, train_alone, train_ranks

MESHES = [("pp=1", 4), ("pp=2", 2), ("dp=2", 1), ("dp=2,pp=2", 4)]


class Heads(nn.Module):
    """Gives numbers, logits of five classes, and two weights as they are."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)
        self.s, self.t = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"p": self.a(x), "c": self.b(x), "s": self.s, "t": self.t}


def batch(step, samples):
    random = torch.Generator().manual_seed(step)
    x, y = torch.randn(samples, 7, generator=random, dtype=torch.float64).split([4, 3], 1)
    ids = torch.randint(5, (samples,), generator=random)
    ids[0 if step == 0 else samples // 2 :][: 2 if step else 1] = -100  # all of a microbatch
    mask = torch.ones(samples, dtype=torch.float64)
    mask[[0, samples // 2]] = 0
    beta = torch.tensor(0.5, dtype=torch.float64)
    return x, {"y": y, "ids": ids, "mask": mask, "lengths": 1 + torch.arange(samples) % 3, "beta": beta}


def over_lengths(output, targets):
    each = (output["p"] - targets["y"]).square()
    counts = torch.arange(3) < targets["lengths"][:, None]
    return (each * counts).sum() / targets["lengths"].sum()


def train(loss, mesh, microbatches, samples=8, steps=4, given=batch):
    """Train on a mesh, and require losses and weights of one process."""
    torch.manual_seed(0)
    blocks, batches = [nn.Linear(4, 4).double(), Heads().double()], [given(step, samples) for step in range(steps)]
    plan = qs.compile("1f1b", mesh=mesh, microbatches=microbatches)
    ranks = train_ranks(plan, blocks, loss, sgd, batches)
    require_equal(ranks, train_alone(blocks, loss, sgd, batches), 1e-11)


EQUAL = {
    "ignored ids, times a weight": lambda o, t: F.cross_entropy(o["c"], t["ids"]) * (-o["s"]).exp(),
    "smoothed, of the wider output": lambda o, t: F.cross_entropy(o["c"], t["ids"], label_smoothing=0.1),
    "masked, scaled by a weight": lambda o, t: (
        ((o["p"] * o["t"] - t["y"]).square().sum(-1) * t["mask"]).sum() / t["mask"].sum()
    ),
    "masked, clamped": lambda o, t: (
        (F.cross_entropy(o["c"], t["ids"].clamp(min=0), reduction="none") * t["mask"]).sum()
        / t["mask"].sum().clamp(min=1)
    ),
    "a hinge": lambda o, t: (o["p"][:, 0] - t["y"][:, 0]).relu().sum(),
    "over lengths": over_lengths,
    "a number among the targets": lambda o, t: F.mse_loss(o["p"], t["y"]) * t["beta"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("loss", EQUAL.values(), ids=EQUAL)
def test_what_weighs_nothing_in_a_microbatch_is_nothing_of_the_batch(loss, mesh, microbatches):
    for samples in (8, 7):
        train(loss, mesh, microbatches, samples)


def by_domain(step, samples):
    """Return a batch in which each half has another id, which is none of a class."""
    x, targets = batch(step, samples)
    return x, {"y": targets["y"], "ids": torch.arange(samples).div(samples // 2, rounding_mode="floor") + 6}


GROUPS = {
    "worst": lambda each, ids: torch.stack([each[ids == one].mean() for one in ids.unique()]).max(),
    "mean of groups": lambda each, ids: torch.stack([each[ids == one].mean() for one in ids.unique()]).mean(),
    "times an id": lambda each, ids: each.mean() * (1 + 0.1 * ids.max()),
    "by how many": lambda each, ids: each.mean() / len(ids.unique()),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_groups_that_replicas_have_one_of_each_are_tried_mixed(group):
    def loss(output, targets):
        return group((output["p"] - targets["y"]).square().mean(-1), targets["ids"])

    with pytest.raises(qs.MisfitError, match="of microbatches it is not that of the batch"):
        train(loss, "dp=2", 1, given=by_domain)
