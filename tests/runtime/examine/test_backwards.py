"""Blocks whose backward is not linear in the gradient are refused where microbatches make that another backward."""

import contextlib
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local
from quintsched.runtime.examine.gradients.backwards import calls_own, why_unlinear
from quintsched.runtime.examine.gradients.microbatches import why_of_microbatch, why_of_others
from quintsched.runtime.examine.gradients.own_backwards import Code
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
    "scaled": with_hook("register_full_backward_hook", lambda m, given, _: (given[0] * 0.9,)),
}
OTHERS = {
    "clamp": Block(backward_of(lambda g: g.clamp(-0.01, 0.01))),
    "largest": Block(backward_of(lambda g: torch.where(g.abs() >= g.abs().mean(), g, 0.0))),
    "clip in a hook": Hooking(),
    "clip of a weight": hooked("register_hook", lambda g: g.clamp(-0.01, 0.01)),
    "sign of a sum": hooked("register_post_accumulate_grad_hook", sign),
    "clip before a module": with_hook("register_full_backward_pre_hook", lambda m, g: (g[0].clamp(-0.1, 0.1),)),
    "decay of its own": hooked("register_hook", lambda g: g + 0.1),
    "loss added": Block(lambda x: AddsLoss.apply(x, x.pow(2).mean())),
}


ARRIVAL = Arrival(GivenTree([Given(torch.tensor([[0.1, -0.4, 0.9], [-1.3, 0.2, 0.6]], dtype=torch.float64))]))


def run(number, block, given, taken):
    return block(given, **taken)


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_gradients_that_are_not_linear_are_found(name):
    block = {**LINEAR, **OTHERS}[name]
    assert Code(block).is_suspect
    found = why_unlinear(run, 3, block, ARRIVAL)
    assert found.why.startswith("block 3 (") == (name in OTHERS)
    assert found.adds == (name in ("decay of its own", "loss added"))
    assert block.inner.weight.grad is None
    assert not SEEN  # as hooks have not run


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


OF_MICROBATCHES = {
    "centred": (Block(backward_of(lambda g: g - g.mean(0))), "mixes samples"),
    "by size": (Block(sized), "mixes samples"),
    "kept on a class": (Block(Kept.apply), "what its latest forward has kept"),
    "halved sums": (hooked("register_post_accumulate_grad_hook", halve), "changes sums"),
    "stepped": (hooked("register_post_accumulate_grad_hook", stepped), "changes weights"),
    **{name: (LINEAR[name], "") for name in LINEAR if name not in ("halved", "log")},
    "mixed forward": (Block(lambda x: x - x.mean(0)), ""),
    "straight through": (Block(lambda x: x + (x.round() - x).detach()), ""),
}


@pytest.mark.parametrize("name", OF_MICROBATCHES)
def test_gradients_of_a_microbatch_that_are_no_part_of_the_batchs_are_found(name):
    block, said = OF_MICROBATCHES[name]
    before = block.inner.weight.clone()
    found = why_of_microbatch(run, 3, block, ARRIVAL) or why_of_others(run, 3, block, ARRIVAL)
    assert torch.equal(before, block.inner.weight)
    assert said in found
    assert bool(said) == bool(found)
    if name == "kept on a class":
        assert not why_of_others(run, 3, block, ARRIVAL, overtaken=False)


INSTALLED = types.ModuleType("installed_clamps")
INSTALLED.__file__ = "/site-packages/installed_clamps.py"
CLAMP = backward_of(lambda g: g.clamp(-0.01, 0.01))
exec("def clamp(x): return function(x)", vars(INSTALLED) | {"function": CLAMP}, vars(INSTALLED))


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


def with_forward_hook():
    block = Block()
    block.inner.register_forward_hook(lambda module, given, made: INSTALLED.clamp(made))
    return block


HIDDEN = {
    "function of an installed package": Block(INSTALLED.clamp),
    "object that is called": Block(Helper()),
    "behind an underscore, by a string": Named((CLAMP,)),
    "reentrant checkpoint": Block(lambda x: checkpoint(INSTALLED.clamp, x, use_reentrant=True)),
    "other checkpoint": Block(lambda x: checkpoint(INSTALLED.clamp, x, use_reentrant=False)),
    "custom operator": Block(torch.ops.quintsched_tests.clamped),
    "forward hook": with_forward_hook(),
    "tensor hook, by a string": HookingByName(None),
    "hook of a node, by a string": HookingByName("_prehook"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_wherever_it_is_written_one_run_shows_it(name):
    block = HIDDEN[name]
    code = Code(block)
    assert code.is_suspect or code.has_more
    assert calls_own(run, 3, block, ARRIVAL)
    is_linear = "hook" in name and "string" in name
    assert ("as a clamp does" in why_unlinear(run, 3, block, ARRIVAL).why) != is_linear
    assert not calls_own(run, 3, Block(), ARRIVAL)
    assert not calls_own(run, 3, Block(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)), ARRIVAL)


def test_what_cannot_be_tried_is_no_less_suspect():
    def fail(x):
        raise ValueError("only numbers of a batch")

    assert (
        "fails where it is tried, ValueError: only numbers of a batch" in why_unlinear(run, 3, Block(fail), ARRIVAL).why
    )


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
    monkeypatch.setattr(Limited, "is_hot", name == "number")

    def work(transport):
        blocks = [nn.Linear(3, 3, dtype=torch.float64), Limited()]
        plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
        engine = Engine(plan, blocks, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        engine.step(x, x)
        engine.step(x, x)
        LATE[name](blocks[1])
        before = [p.clone() for block in blocks for p in block.parameters()]
        with pytest.raises(MisfitError, match="changes gradients"):
            engine.step(x, x)
        assert all(map(torch.equal, before, [p for block in blocks for p in block.parameters()]))

    run_local(2, work)


def test_what_is_added_is_refused_where_microbatches_are_unlike():
    def work(transport):
        engine = Engine(
            qs.compile("1f1b", mesh="pp=2", microbatches=2),
            [Block(), Block(lambda x: AddsLoss.apply(x, x.pow(2).mean()))],
            F.mse_loss,
            lambda p: torch.optim.SGD(p, lr=0.1),
            loss_over="samples",
            transport=transport,
        )
        x = torch.ones(4, 3, dtype=torch.float64)
        engine.step(x, x)
        with pytest.raises(MisfitError, match="adds to gradients"):
            engine.step(x[:3], x[:3])

    run_local(2, work)


def test_plain_blocks_are_not_run():
    for block in (Block(), Block(F.relu), nn.TransformerEncoderLayer(4, 2), nn.Linear(2, 2)):
        code = Code(block)
        assert not code.is_suspect
        assert not code.has_more


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


class DividedEach(Block):
    def forward(self, x, phase):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / phase[:, None])
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
    def run(transport):
        plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
        engine = Engine(plan, [block(), Block()], F.mse_loss, torch.optim.SGD, dtype=torch.float64, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        if later is not None:
            engine.step(x, x, phase=first)
        with pytest.raises(MisfitError, match=r"changes gradients by more than|mixes samples in its backward"):
            engine.step(x, x, phase=first if later is None else later)

    run_local(2, run)


def test_extras_that_leave_a_backward_as_it_is_are_taken():
    def run(transport):
        plan = qs.compile("1f1b", mesh="dp=1", microbatches=4)  # of one sample
        engine = Engine(plan, [DividedEach()], F.mse_loss, torch.optim.SGD, dtype=torch.float64, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        engine.step(x, x, phase=torch.arange(1.0, 5))

    run_local(1, run)


def test_microbatches_of_one_sample_hide_no_mixing():
    def run(transport):
        plan = qs.compile("1f1b", mesh="dp=1", microbatches=4)
        block = Block(backward_of(lambda g: g - g.mean(0)))
        engine = Engine(plan, [block], F.mse_loss, torch.optim.SGD, dtype=torch.float64, transport=transport)
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with pytest.raises(MisfitError, match=r"block 0 .* in its backward"):
            engine.step(x, x)

    run_local(1, run)


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

    def backwards(transport):
        engine = Engine(plan, [build()], F.mse_loss, torch.optim.SGD, dtype=torch.float64, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        refused = pytest.raises(MisfitError, match="a tensor that it asks for its value has another")
        with refused if is_refused else contextlib.nullcontext():
            engine.step(x, x)

    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    run_local(1, backwards)
