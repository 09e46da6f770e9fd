"""Blocks whose backward is not linear in the gradient, or another for microbatches, are refused on all ranks."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quintsched.runtime.examine.gradients.microbatch_gradients import why_of_microbatch, why_of_others
from quintsched.runtime.examine.gradients.nonlinear_backwards import calls_own, why_unlinear
from quintsched.runtime.guards.custom_backwards import Code

from ..trials import ones, refused, require_verdict
from .backward_blocks import (
    ARRIVAL,
    CLAMP,
    INSTALLED,
    LINEAR,
    OTHERS,
    SEEN,
    AddsLoss,
    Block,
    backward_of,
    halve,
    hooked,
    sign,
    tried,
)

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


SUM = functools.partial(F.mse_loss, reduction="sum")
CLAMPED = functools.partial(Block, CLAMP)
CLIPPED = functools.partial(hooked, "register_hook", lambda g: g.clamp(-0.01, 0.01))
ADDED = functools.partial(Block, lambda x: AddsLoss.apply(x, x.pow(2).mean()))


@pytest.mark.parametrize(
    ("last", "loss", "options", "said"),
    [
        (CLAMPED, F.mse_loss, {}, "as a clamp does"),
        (CLAMPED, F.mse_loss, {"loss_over": "samples"}, r'loss_over="microbatch"'),
        (CLAMPED, F.mse_loss, {"loss_over": "microbatch"}, ""),
        (CLAMPED, SUM, {}, ""),
        (CLIPPED, SUM, {}, "clip=…"),
        (ADDED, F.mse_loss, {}, "adds to gradients"),
        (ADDED, F.mse_loss, {"loss_over": "samples"}, ""),
    ],
)
def test_all_ranks_refuse_what_microbatches_change(last, loss, options, said):
    require_verdict(said, lambda: [Block(), last()], X3, loss, **options)


def clamp(gradient):
    return gradient.clamp(-0.1, 0.1)


class Hooked(Block):
    """Registers the hook that a function of its output finds, and of an extra where there is one."""

    def __init__(self, find):
        super().__init__()
        self.find = find

    def forward(self, x):
        x = super().forward(x)
        hook = self.find(x)
        if hook is not None and x.requires_grad:
            x.register_hook(hook)
        return x


class Phased(Hooked):
    def forward(self, x, phase):
        x = Block.forward(self, x)
        if x.requires_grad:
            x.register_hook(self.find(phase))
        return x


def by_phase(phase):
    return clamp if phase > 2 else torch.neg


def divide(phase):
    return lambda gradient: gradient / phase.mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("find", "phases"),
    [(by_phase, [0, 3]), (by_phase, [torch.tensor(0)]), (by_phase, [torch.tensor(0.0)]), (divide, [torch.ones(4)])],
)
def test_extras_that_are_others_later_are_tried(find, phases):
    said = refused(lambda: [Phased(find), Block()], [(*X3[0], {"phase": phase}) for phase in phases])
    assert "changes gradients by more than" in said or "mixes samples in its backward" in said


class Guarded(Hooked):
    def forward(self, x):
        if x.isnan().any():
            raise ValueError
        self.seen = float(x.detach().norm())
        return super().forward(x)


ASKED = "a tensor that it asks for its value has another"
ASKING = {
    "a bool": (lambda: Hooked(lambda x: clamp if x.abs().max() > 1e5 else None), ASKED),
    "a number": (lambda: Hooked(lambda x: clamp if x.abs().max().item() > 1e5 else None), ASKED),
    "a count": (lambda: Hooked(lambda x: clamp if int((x > 1e5).sum()) > 0 else None), ASKED),
    "a guard and a log": (lambda: Guarded(lambda x: lambda g: 0 * g if g.isnan().any() else -g), ""),
}


@pytest.mark.parametrize("name", ASKING)
def test_data_that_steer_a_backward_later_are_tried(name):
    build, said = ASKING[name]
    require_verdict(said, lambda: [build()], X3, mesh="dp=1")


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_gradients_that_are_not_linear_are_found(name):
    block = {**LINEAR, **OTHERS}[name]
    assert Code(block).is_suspect
    found = why_unlinear(tried(block), ARRIVAL)
    assert found.why.startswith("block 3 (") == (name in OTHERS)
    assert found.adds == (name in ("decay of its own", "loss added"))
    assert block.inner.weight.grad is None
    assert not SEEN  # as hooks have not run


@torch.library.custom_op("quintsched_tests::clamped", mutates_args=())
def clamped(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


clamped.register_autograd(lambda ctx, gradient: gradient.clamp(-0.01, 0.01))


class Helper:
    def __call__(self, x):
        return CLAMP(x)


class Named(Block):
    def forward(self, x):
        return getattr(self, "_ch" + "ange")(self.inner(x))

    def _change(self, x):
        return functools.partial(*self.change)(x)


class HookingByName(Block):
    def forward(self, x):
        x = self.inner(x)
        getattr(x if self.change is None else x.grad_fn, "register" + (self.change or "_hook"))(lambda *g: None)
        return x


HIDDEN = {
    "function of an installed package": Block(INSTALLED.clamp),
    "object that is called": Block(Helper()),
    "behind an underscore, by a string": Named((CLAMP,)),
    "reentrant checkpoint": Block(lambda x: checkpoint(INSTALLED.clamp, x, use_reentrant=True)),
    "other checkpoint": Block(lambda x: checkpoint(INSTALLED.clamp, x, use_reentrant=False)),
    "custom operator": Block(torch.ops.quintsched_tests.clamped),
    "forward hook": hooked("register_forward_hook", lambda module, given, made: INSTALLED.clamp(made), on="inner"),
    "tensor hook, by a string": HookingByName(None),
    "hook of a node, by a string": HookingByName("_prehook"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_wherever_it_is_written_one_run_shows_it(name):
    block = HIDDEN[name]
    code = Code(block)
    assert code.is_suspect or code.has_more
    assert calls_own(tried(block), ARRIVAL)
    is_linear = "hook" in name and "string" in name
    assert ("as a clamp does" in why_unlinear(tried(block), ARRIVAL).why) != is_linear
    assert not calls_own(tried(Block()), ARRIVAL)
    assert not calls_own(tried(Block(lambda x: checkpoint(torch.tanh, x, use_reentrant=True))), ARRIVAL)


def test_plain_blocks_are_not_run():
    for block in (Block(), Block(F.relu), nn.TransformerEncoderLayer(4, 2), nn.Linear(2, 2)):
        code = Code(block)
        assert not code.is_suspect
        assert not code.has_more


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

    said = "" if begins is None else r"block 0 \(Seeing\) goes in its forward by gradients"
    steps = 4 if begins is None else begins + 1
    require_verdict(said, [Seeing(begins == 0)], X3 * steps, mesh="dp=1", microbatches=1, change=change)


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        Kept.mask = x > 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Kept.mask


def stepped(weight):
    with torch.no_grad():
        weight.add_(weight.grad, alpha=-0.1)


def sized(x):
    return x / len(x) + (x - x / len(x)).detach()


class Local(Block):
    """Trains by a loss of its own, within its forward."""

    def forward(self, x):
        y = super().forward(x)
        if self.training and torch.is_grad_enabled():
            y.square().sum().backward(retain_graph=True)
        return y


class Written(Block):
    def forward(self, x):
        self.inner.weight.grad = torch.ones_like(self.inner.weight)
        return super().forward(x)


class Cancelling(Block):
    """Has a weight whose gradient is 0 but for rounding, as the bias of keys."""

    def __init__(self):
        super().__init__(torch.tanh)
        self.shift = nn.Parameter(torch.full((1,), 0.3, dtype=torch.float64))

    def forward(self, x):
        return (super().forward(x) + self.shift).softmax(-1)


OF_MICROBATCHES = {
    "local loss": (Local(torch.tanh), "adds a gradient to its 'inner."),
    "gradient written": (Written(torch.tanh), "adds a gradient to its 'inner.weight'"),
    "centred": (Block(backward_of(lambda g: g - g.mean(0))), "mixes samples"),
    "by size": (Block(sized), "mixes samples"),
    "kept on a class": (Block(Kept.apply), "what its latest forward has kept"),
    "halved sums": (hooked("register_post_accumulate_grad_hook", halve), "changes sums"),
    "stepped": (hooked("register_post_accumulate_grad_hook", stepped), "changes weights"),
    **{name: (LINEAR[name], "") for name in LINEAR if name not in ("halved", "log")},
    "cancelling": (Cancelling(), ""),
    "mixed forward": (Block(lambda x: x - x.mean(0)), ""),
    "straight through": (Block(lambda x: x + (x.round() - x).detach()), ""),
}


@pytest.mark.parametrize("name", OF_MICROBATCHES)
def test_gradients_of_a_microbatch_that_are_no_part_of_the_batchs_are_found(name):
    block, said = OF_MICROBATCHES[name]
    before = block.inner.weight.clone()
    found = why_of_microbatch(tried(block), ARRIVAL) or why_of_others(tried(block), ARRIVAL)
    assert torch.equal(before, block.inner.weight)
    assert said in found
    assert bool(said) == bool(found)
    if name == "kept on a class":
        assert not why_of_others(tried(block), ARRIVAL, overtaken=False)
