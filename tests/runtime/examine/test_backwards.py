"""Blocks whose backward is not linear in the gradient are refused where microbatches make that another backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local
from quintsched.runtime.examine.backwards import suspects, why_unlinear
from quintsched.runtime.parallel.proof.arrivals import Arrival, Given, GivenTree


def backward_of(change):
    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return change(gradient)

    return Changed.apply


class Block(nn.Module):
    def __init__(self, change=lambda x: x):
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float64)
        self.change = change

    def forward(self, x):
        return torch.tanh(self.change(self.inner(x)))


class Hooking(Block):
    def forward(self, x):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm())
        return x


class AddsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


def hooked(how, hook):
    block = Block()
    getattr(block.inner.weight, how)(hook)
    return block


def with_hook(how, hook):
    block = Block()
    getattr(block.inner, how)(hook)
    return block


SEEN: list[float] = []
LINEAR = {
    "reversal": Block(backward_of(torch.neg)),
    "of each sample": Block(backward_of(lambda g: g * (g.abs().sum(1) / g.norm(dim=1))[:, None])),
    "mask": hooked("register_hook", lambda g: g * torch.eye(3, dtype=g.dtype)),
    "mean taken out": hooked("register_hook", lambda g: g - g.mean()),
    "log": hooked("register_hook", lambda g: SEEN.append(float(g.sum()))),
    "halved": hooked("register_post_accumulate_grad_hook", lambda p: p.grad.mul_(0.5)),
    "scaled": with_hook("register_full_backward_hook", lambda m, given, _: (given[0] * 0.9,)),
}
OTHERS = {
    "clamp": Block(backward_of(lambda g: g.clamp(-0.01, 0.01))),
    "largest": Block(backward_of(lambda g: torch.where(g.abs() >= g.abs().mean(), g, 0.0))),
    "clip in a hook": Hooking(),
    "clip of a weight": hooked("register_hook", lambda g: g.clamp(-0.01, 0.01)),
    "sign of a sum": hooked("register_post_accumulate_grad_hook", lambda p: p.grad.sign_()),
    "clip before a module": with_hook("register_full_backward_pre_hook", lambda m, g: (g[0].clamp(-0.1, 0.1),)),
    "decay of its own": hooked("register_hook", lambda g: g + 0.1),
    "loss added": Block(lambda x: AddsLoss.apply(x, x.pow(2).mean())),
}


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_gradients_that_are_not_linear_are_found(name):
    block = {**LINEAR, **OTHERS}[name]
    assert suspects({3: block, 4: block}) == {3: block}
    arrival = Arrival(GivenTree([Given(torch.tensor([[0.1, -0.4, 0.9], [-1.3, 0.2, 0.6]], dtype=torch.float64))]))
    found = why_unlinear(lambda number, block, given, taken: block(given, **taken), 3, block, arrival)
    assert found.why.startswith("block 3 (") == (name in OTHERS)
    assert found.adds == (name in ("decay of its own", "loss added"))
    assert block.inner.weight.grad is None
    assert not SEEN  # as hooks have not run


def test_plain_blocks_are_not_run():
    assert not suspects(dict(enumerate([Block(), nn.TransformerEncoderLayer(4, 2), nn.Linear(2, 2)])))


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
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def builder():
        return {
            "clamp": lambda: Block(backward_of(lambda g: g.clamp(-0.01, 0.01))),
            "clip of a weight": lambda: hooked("register_hook", lambda g: g.clamp(-0.01, 0.01)),
            "loss added": lambda: Block(lambda x: AddsLoss.apply(x, x.pow(2).mean())),
        }[name]()

    def work(transport):
        given = dict(transport=transport, **options)
        engine = Engine(plan, [Block(), builder()], loss, lambda p: torch.optim.SGD(p, lr=0.1), **given)
        x = torch.ones(4, 3, dtype=torch.float64)
        if said:
            with pytest.raises(MisfitError, match=said):
                engine.step(x, x)
        else:
            engine.step(x, x)

    run_local(2, work)
