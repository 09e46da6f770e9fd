"""Losses of unlike microbatches, or that go by what belongs to no sample: as of the whole batch, or refused.

So are losses and metrics over slices of sequences, where tokens are by themselves, or are not.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import SumOfMeans

from ...helpers.blocks import of_kind
from ...helpers.training import check_equality, random_batch, sgd, train_ranks
from .. import random_losses
from ..random_losses import WIDTH

MESHES = [("pp=1", 4), ("pp=2", 2), ("dp=2", 1), ("dp=2,pp=2", 4)]


class Heads(random_losses.Heads):
    """Gives its input too, and centres, which are as many rows as it is told."""

    def __init__(self, rows):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x):
        return super().forward(x) | {"x": x, "centres": self.centres}


def batch(step, samples):
    random = torch.Generator().manual_seed(step)
    x, y = torch.randn(samples, WIDTH + 3, generator=random, dtype=torch.float64).split([WIDTH, 3], 1)
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


def train(loss, mesh, microbatches, sizes=(8,) * 4, given=batch, rows=5, within=1e-12):
    """Train on a mesh, and require losses and weights of one process."""
    torch.manual_seed(0)
    blocks, batches = [nn.Linear(WIDTH, WIDTH), Heads(rows)], [given(*one) for one in enumerate(sizes)]
    plan = qs.compile("1f1b", mesh=mesh, microbatches=microbatches)
    check_equality(plan, [block.double() for block in blocks], loss, sgd, batches, tolerance=within)


EQUAL = {
    "ignored ids, times a weight": lambda o, t: F.cross_entropy(o["logits"], t["ids"]) * (-o["s"]).exp(),
    "masked, or nothing": lambda o, t: (
        ((o["p"] - t["y"]).square().sum(-1) * t["mask"]).sum() / t["mask"].sum()
        if t["mask"].any()
        else 0 * o["p"].sum()
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
        train(loss, mesh, microbatches, (samples,) * 4, within=1e-11)


def centred(output, targets):
    kinds = targets["y"].argmax(1)
    return (
        F.cross_entropy(output["logits"], kinds) + 0.1 * (output["x"] - output["centres"][kinds]).square().sum(1).mean()
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [5, 6, 7, 9])
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES[1:])
def test_rows_of_no_sample_are_none_whatever_the_number_of_samples(mesh, microbatches, rows):
    train(centred, mesh, microbatches, [8, 8, 8, 5], rows=rows)


def with_step(step, samples):
    """Return a batch whose targets have the number of the step."""
    x, targets = batch(step, samples)
    return x, targets | {"a": torch.tensor(float(step))}


def by_domain(step, samples):
    """Return a batch in which each half has another id, which is none of a class."""
    x, targets = batch(step, samples)
    return x, {"y": targets["y"], "ids": torch.arange(samples).div(samples // 2, rounding_mode="floor") + 6}


def of_groups(group):
    return lambda o, t: group((o["p"] - t["y"]).square().mean(-1), t["ids"]), by_domain


def squares(o, t, *, shift=0):
    return (o["p"] + shift - t["y"]).square()


def count(targets):
    return torch.tensor(len(targets["y"]))


TERMS = ((lambda o, t: ((-o["v"]).exp() * squares(o, t)).sum(), count), (lambda o, t: o["v"].exp().sum(), count))
REFUSED = {
    "added to a sum": (lambda o, t: squares(o, t).sum() + 5 * t["a"], with_step),
    "times a root": (lambda o, t: squares(o, t).mean() + t["a"] * squares(o, t).mean().sqrt(), with_step),
    "worst group": of_groups(lambda each, ids: torch.stack([each[ids == one].mean() for one in ids.unique()]).max()),
    "groups' mean": of_groups(lambda each, ids: torch.stack([each[ids == one].mean() for one in ids.unique()]).mean()),
    "times an id": of_groups(lambda each, ids: each.mean() * (1 + 0.1 * ids.max())),
    "by how many": of_groups(lambda each, ids: each.mean() / len(ids.unique())),
    "its value is 0": (lambda o, t: ((-o["v"]).exp() * squares(o, t)).sum() + o["v"].sum(), batch),
    "its gradient too": (lambda o, t: squares(o, t, shift=o["v"]).sum() + 5 * o["v"].square().sum(), batch),
    "of a sum with its weight": (
        lambda o, t: (squares(o, t, shift=o["v"]).sum() + o["v"].square().sum(), len(t["y"])),
        batch,
    ),
    "a factor of what samples share": (
        lambda o, t: squares(o, t, shift=o["v"]).mean() + o["v"].sum() * o["p"].std(),
        batch,
    ),
    "a term alone": (SumOfMeans(*TERMS), batch),
}
WHEN = {
    with_step: (3, r"in step 1 it is not so|since a number among the targets has changed"),
    by_domain: (4, "of microbatches it is not that of the batch"),
    batch: (1, r"belongs to no sample|depends on the other samples"),
}
"""In so many steps, and with these words."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES[1:])
@pytest.mark.parametrize(("loss", "given"), REFUSED.values(), ids=REFUSED)
def test_terms_that_show_later_or_in_no_microbatch_are_refused_before_they_matter(loss, given, mesh, microbatches):
    """Numbers of the targets, groups of which each microbatch has one, and terms that begin at nothing."""
    steps, words = WHEN[given]
    with pytest.raises(qs.MisfitError, match=words):
        train(loss, mesh, microbatches, [8] * steps, given)


PLANS = {
    "cp": qs.compile("gpipe", mesh="cp=2", microbatches=2),
    "slices": qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=2),
}


Token = of_kind(nn.Linear, lambda self, x, past=None, context=None: nn.Linear.forward(self, x))


def token_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Token(4, 5).double(), Token(5, 3).double()]


def tokens(*, ids: bool = False) -> tuple[Tensor, Tensor]:
    inputs, targets = random_batch(0, 4, 16, 4)
    return inputs, targets[..., :3].argmax(-1) if ids else targets[..., :3]


def train_slices(plan, loss, *, ids=False, **more):
    return train_ranks(PLANS[plan], token_blocks(), loss, sgd, [tokens(ids=ids)], **more)


MIXED = {
    "differences": lambda o, t: F.mse_loss(o, t) + o.diff(dim=1).square().mean(),
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
        train_slices(plan, MIXED[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*APART, *OF_IDS])
@pytest.mark.parametrize("plan", PLANS)
def test_losses_of_tokens_are_those_of_one_process(plan, name):
    loss, ids = (APART | OF_IDS)[name], name in OF_IDS
    check_equality(PLANS[plan], token_blocks(), loss, sgd, [tokens(ids=ids)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS)
def test_metrics(plan):
    (inputs, targets), right = tokens(ids=True), lambda o, t: (o.argmax(-1) == t).double().mean()
    for rank in train_slices(plan, OF_IDS["classes"], ids=True, metrics={"m": right}):
        expected = float(right(nn.Sequential(*token_blocks())(inputs), targets))
        assert [metric for _, metric in rank.figures] == pytest.approx([expected], rel=1e-12)
    for mixed in (lambda o, t: o.diff(n=2, dim=1).abs().mean(), lambda o, t: (o.argmax(-1) == t).all(1).double().sum()):
        with pytest.raises(qs.MisfitError, match="metric 'm' is not that of the batch"):
            train_slices(plan, OF_IDS["classes"], ids=True, metrics={"m": mixed})
