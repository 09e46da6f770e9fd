"""Blocks whose backward is another for microbatches are refused on all ranks, before weights change."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local
from quintsched.runtime.examine.gradients import nonlinear_backwards
from quintsched.runtime.examine.gradients.nonlinear_backwards import why_unlinear

from .backward_blocks import INSTALLED, AddsLoss, Block, backward_of, hooked, sign


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
    def run(transport):
        block, plan = Seeing(begins == 0), qs.compile("1f1b", mesh="dp=1", microbatches=1)
        engine = Engine(plan, [block], F.mse_loss, torch.optim.SGD, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        for step in range(4):
            block.goes = block.goes or step == begins
            says = pytest.raises(MisfitError, match=r"block 0 \(Seeing\) goes in its forward by gradients")
            with says if block.goes else contextlib.nullcontext():
                engine.step(x, x)
            if block.goes:
                break
        assert block.goes is (begins is not None)

    run_local(1, run)


def test_extras_that_leave_a_backward_as_it_is_are_taken():
    def run(transport):
        plan = qs.compile("1f1b", mesh="dp=1", microbatches=4)  # of one sample
        engine = Engine(plan, [DividedEach()], F.mse_loss, torch.optim.SGD, dtype=torch.float64, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        engine.step(x, x, phase=torch.arange(1.0, 5))

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


TURNED = backward_of(torch.neg)


class Turning(Block):
    def __init__(self, limit=1.0, frozen=1.0):
        super().__init__(TURNED)
        self.limit = limit
        self.frozen = nn.Parameter(torch.tensor(frozen), requires_grad=False)


@pytest.mark.parametrize(
    ("others", "count"),
    [
        (lambda: [Turning(), Turning()], 1),
        (lambda: [Turning(2.0), Turning(2.0)], 2),
        (lambda: [Turning(frozen=2.0), Turning()], 2),
        (lambda: [hooked("register_hook", lambda g: -g), hooked("register_hook", lambda g: -g)], 3),
    ],
)
def test_blocks_of_one_kind_are_tried_once(others, count, monkeypatch):
    tried = []

    def why(run, number, *given, **options):
        tried.append(number)
        return why_unlinear(run, number, *given, **options)

    monkeypatch.setattr(nonlinear_backwards, "why_unlinear", why)

    def work(transport):
        plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
        engine = Engine(plan, [Turning(), *others()], F.mse_loss, torch.optim.SGD, transport=transport)
        x = torch.ones(4, 3, dtype=torch.float64)
        engine.step(x, x)

    run_local(1, work)
    assert len(set(tried)) == count
