"""Blocks with backwards of their own: some linear in the gradient, others not."""

import types
from operator import attrgetter

import torch
from torch import nn

from quintsched.runtime.examine.trial_block_runs import TriedBlock
from quintsched.runtime.parallel.cut_proofs.trial_inputs import Arrival, GivenTree, TrialInput


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


def hooked(how, hook, on="inner.weight"):
    block = Block()
    getattr(attrgetter(on)(block), how)(hook)
    return block


def halve(weight):
    weight.grad.mul_(0.5)


def sign(weight):
    weight.grad.sign_()


SEEN: list[float] = []
LINEAR = {
    "reversal": Block(backward_of(torch.neg)),
    "of each sample": Block(backward_of(lambda g: g * (g.abs().sum(1) / g.norm(dim=1))[:, None])),
    "mask": hooked("register_hook", lambda g: g * torch.eye(3, dtype=g.dtype)),
    "mean taken out": hooked("register_hook", lambda g: g - g.mean()),
    "log": hooked("register_hook", lambda g: SEEN.append(float(g.sum()))),
    "halved": hooked("register_post_accumulate_grad_hook", halve),  # of one microbatch
    "scaled": hooked("register_full_backward_hook", lambda m, given, _: (given[0] * 0.9,), "inner"),
}
OTHERS = {
    "clamp": Block(backward_of(lambda g: g.clamp(-0.01, 0.01))),
    "largest": Block(backward_of(lambda g: torch.where(g.abs() >= g.abs().mean(), g, 0.0))),
    "clip in a hook": Hooking(),
    "clip of a weight": hooked("register_hook", lambda g: g.clamp(-0.01, 0.01)),
    "sign of a sum": hooked("register_post_accumulate_grad_hook", sign),
    "clip before a module": hooked(
        "register_full_backward_pre_hook", lambda m, g: (g[0].clamp(-0.1, 0.1),), on="inner"
    ),
    "decay of its own": hooked("register_hook", lambda g: g + 0.1),
    "loss added": Block(lambda x: AddsLoss.apply(x, x.pow(2).mean())),
}


ARRIVAL = Arrival(GivenTree([TrialInput(torch.tensor([[0.1, -0.4, 0.9], [-1.3, 0.2, 0.6]], dtype=torch.float64))]))


def tried(block):
    return TriedBlock(lambda number, block, given, taken: block(given, **taken), 3, block)


INSTALLED = types.ModuleType("installed_clamps")
INSTALLED.__file__ = "/site-packages/installed_clamps.py"
CLAMP = backward_of(lambda g: g.clamp(-0.01, 0.01))
exec("def clamp(x): return function(x)", vars(INSTALLED) | {"function": CLAMP}, vars(INSTALLED))
