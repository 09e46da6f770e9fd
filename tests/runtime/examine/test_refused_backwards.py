"""Blocks whose backward is another for microbatches are refused on all ranks, before weights change."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ..trials import ones, refused, taken
from .backward_blocks import INSTALLED, AddsLoss, Block, backward_of, hooked, sign

X3 = ones(4, 3, dtype=torch.float64)


class Limited(Block):
    limit, is_hot = 1e9, False

    def forward(self, x):
        return super().forward(backward_of(lambda g: g.clamp(-self.limit, self.limit))(x) if self.is_hot else x)


LATE = {
    "number": lambda block: setattr(block, "limit", 0.001),
    "flag": lambda block: (setattr(Limited, "is_hot", True), setattr(block, "limit", 0.001)),
    "function": lambda block: setattr(block, "change", INSTALLED.clamp),
    "hook": lambda block: block.inner.weight.register_post_accumulate_grad_hook(sign),
}


@pytest.mark.parametrize(
    "name", ["number", "hook", *(pytest.param(n, marks=pytest.mark.slow) for n in ("flag", "function"))]
)
def test_what_comes_later_is_refused_before_weights_change(name, monkeypatch):
    def change(blocks, number):
        if number == 2:
            LATE[name](blocks[1])

    monkeypatch.setattr(Limited, "is_hot", name == "number")
    blocks = [nn.Linear(3, 3, dtype=torch.float64), Limited()]
    assert "changes gradients" in refused(blocks, X3 * 3, change=change)


@pytest.mark.parametrize(
    ("name", "loss", "options", "said"),
    [
        ("clamp", F.mse_loss, {}, "as a clamp does"),
        ("clamp", F.mse_loss, {"loss_over": "samples"}, r'loss_over="microbatch"'),
        ("clamp", F.mse_loss, {"loss_over": "microbatch"}, ""),
        ("clamp", lambda output, targets: F.mse_loss(output, targets, reduction="sum"), {}, ""),
        ("clip of a weight", lambda output, targets: F.mse_loss(output, targets, reduction="sum"), {}, "clip=…"),
        ("loss added", F.mse_loss, {}, "adds to gradients"),
        ("loss added", F.mse_loss, {"loss_over": "samples"}, ""),
    ],
)
def test_all_ranks_refuse_what_microbatches_change(name, loss, options, said):
    def blocks():
        last = {
            "clamp": lambda: Block(backward_of(lambda g: g.clamp(-0.01, 0.01))),
            "clip of a weight": lambda: hooked("register_hook", lambda g: g.clamp(-0.01, 0.01)),
            "loss added": lambda: Block(lambda x: AddsLoss.apply(x, x.pow(2).mean())),
        }
        return [Block(), last[name]()]

    if said:
        assert re.search(said, refused(blocks, X3, loss, **options))
    else:
        taken(blocks, X3, loss, **options)


class Phased(Block):
    def forward(self, x, phase):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook((lambda g: g.clamp(-0.1, 0.1)) if phase > 2 else torch.neg)
        return x


class Divided(Block):
    def forward(self, x, phase):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / phase.mean())
        return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("block", "first", "later"),
    [
        (Phased, 0, 3),
        (Phased, torch.tensor(0), None),
        (Phased, torch.tensor(0.0), None),
        (Divided, torch.ones(4), None),
    ],
)
def test_extras_that_are_others_later_are_tried(block, first, later):
    batches = [(*X3[0], {"phase": phase}) for phase in ([first] if later is None else [first, later])]
    said = refused(lambda: [block(), Block()], batches)
    assert "changes gradients by more than" in said or "mixes samples in its backward" in said


class Seeing(Block):
    """Keeps how large its gradients are; its forward may go by that."""

    def __init__(self, goes):
        super().__init__()
        self.seen, self.goes = [0.0], goes

    def forward(self, x):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.seen.append(float(gradient.norm())))
        return x * (1 - 0.1 * self.seen[-1]) if self.goes else x


@pytest.mark.parametrize("begins", [0, 2, None])
def test_a_forward_that_goes_by_gradients_that_were_seen_is_refused(begins):
    def change(blocks, number):
        blocks[0].goes = blocks[0].goes or number == begins

    more = {"mesh": "dp=1", "microbatches": 1, "change": change}
    if begins is None:
        taken([Seeing(goes=False)], X3 * 4, **more)
    else:
        said = refused([Seeing(begins == 0)], X3 * (begins + 1), **more)
        assert "block 0 (Seeing) goes in its forward by gradients" in said


def clamping_if(asks):
    class Asking(Block):
        def forward(self, x):
            x = super().forward(x)
            if asks(x) and x.requires_grad:
                x.register_hook(lambda g: g.clamp(-0.1, 0.1))
            return x

    return Asking()


def guarded():
    class Guarded(Block):
        def forward(self, x):
            if x.isnan().any():
                raise ValueError
            self.seen = float(x.detach().norm())
            x = super().forward(x)
            if x.requires_grad:
                x.register_hook(lambda g: torch.zeros_like(g) if g.isnan().any() else -g)
            return x

    return Guarded()


ASKING = {
    "a bool": (lambda: clamping_if(lambda x: x.abs().max() > 1e5), True),
    "a number": (lambda: clamping_if(lambda x: x.abs().max().item() > 1e5), True),
    "a count": (lambda: clamping_if(lambda x: int((x > 1e5).sum()) > 0), True),
    "a guard and a log": (guarded, False),
}


@pytest.mark.parametrize("name", ASKING)
def test_data_that_steer_a_backward_later_are_tried(name):
    build, is_refused = ASKING[name]
    if is_refused:
        said = refused(lambda: [build()], X3, mesh="dp=1")
        assert "a tensor that it asks for its value has another" in said
    else:
        taken(lambda: [build()], X3, mesh="dp=1")
