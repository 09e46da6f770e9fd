"""Losses that blocks return are sums over samples, or means over them, as the loss function is; others are refused."""

import functools
import logging
import os
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Carry, Engine, MoE, run_local
from quintsched.runtime.blocks.block_outlines import build_model
from quintsched.runtime.examine.block_losses import examine_block_loss
from quintsched.runtime.examine.losses.loss_weights import Over
from quintsched.runtime.parallel.cut_proofs import trial_inputs
from quintsched.runtime.parallel.cut_proofs.trial_inputs import Arrival, GivenTree

WIDTH, SAMPLES = 4, 13


class Block(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.inner, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)
        self.loss, self.step = loss, 0

    def forward(self, x):
        y = self.inner(x)
        return y, self.loss(self, y)


class Supervised(Block):
    def forward(self, x, targets):
        y = self.inner(x)
        return y, self.loss(y, targets)


class WithExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(WIDTH, 3, lambda: nn.Linear(WIDTH, WIDTH), top_k=1, balance=0.1)

    def forward(self, x):
        return self.moe(x)


def balance(block, y):
    p = block.router(y.detach()).softmax(-1)
    return (F.one_hot(p.argmax(-1), 3).to(p).mean(0) * p.mean(0)).sum()


def contrast(_, y):
    z = F.normalize(y, dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def near(_, y):
    sizes = y.square().mean(1)
    return (sizes * (sizes < 5 * sizes.detach().mean())).mean()


SUMS = {
    "of squares": lambda _, y: y.square().sum(),
    "of each's variance": lambda _, y: y.var(1).sum(),
    "of logits": lambda block, y: block.router(y.detach()).logsumexp(-1).square().sum(),
}
MEANS = {
    "of squares": lambda _, y: y.square().mean(),
    "hinge": lambda _, y: (1 - y.norm(dim=1)).relu().mean(),
    "of logits": lambda block, y: block.router(y.detach()).logsumexp(-1).square().mean(),
    "penalty": lambda block, _: block.inner.weight.square().sum(),
}
OTHERS = {
    "variance": lambda _, y: y.var(0, unbiased=False).mean(),
    "a little variance": lambda _, y: y.square().mean() + 1e-4 * y.var(0, unbiased=False).mean(),
    "balance": balance,
    "contrast": contrast,
    "near the mean": near,
    "norm": lambda _, y: y.norm(),
    "largest": lambda _, y: y.max(),
    "logarithm": lambda _, y: (1 + y.square().mean()).log(),
    "those above": lambda _, y: y[y > 0].mean(),
    "first": lambda _, y: y[0].mean(),
    "scaled": lambda _, y: (y / y.detach().norm()).square().mean(),
    "root": lambda _, y: y.square().sum() / len(y) ** 0.5,
}
EVERY = {
    **{f"sum {n}": (f, Over.SUM) for n, f in SUMS.items()},
    **{f"mean {n}": (f, Over.SAMPLES) for n, f in MEANS.items()},
}
EVERY |= {name: (loss, None) for name, loss in OTHERS.items()}


def found_of(block, samples=SAMPLES, seed=0, **extras):
    torch.manual_seed(seed)
    block = block.double()
    before = {name: weight.clone() for name, weight in block.state_dict().items()}
    extras = {name: GivenTree([trial_inputs.TrialInput(extra)]) for name, extra in extras.items()}
    arrival = Arrival(
        GivenTree([trial_inputs.TrialInput(torch.randn(samples, WIDTH, dtype=torch.float64))]), {}, extras
    )

    def alike(some):
        torch.manual_seed(some.start)
        return nullcontext()

    found = examine_block_loss(lambda _, b, x, taken: b(x, **taken), 1, block, arrival, samples, alike)
    assert all(torch.equal(weight, before[name]) for name, weight in block.state_dict().items())
    assert not found.why
    return [weight.over for weight in found.over]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVERY)
def test_sums_and_means_are_told_from_others(name):
    loss, over = EVERY[name]
    for samples in (SAMPLES, 3)[: 1 if loss is near else 2]:  # of three none is five times their mean
        found = found_of(Block(loss), samples)
        assert found == ([] if over is None else [over])


def test_routers_of_this_package_and_targets_that_count():
    assert found_of(WithExperts()) == [Over.SUM]
    targets = torch.randint(0, WIDTH, (SAMPLES,))
    assert found_of(Supervised(F.cross_entropy), targets=targets) == [Over.TARGETS]
    clamped = Supervised(lambda y, t: F.cross_entropy(y, t.clamp(min=0)))
    assert Over.SAMPLES in found_of(clamped, targets=targets)


class Beside(nn.Linear):
    def __init__(self, rows, *, asks):
        super().__init__(WIDTH, WIDTH)
        self.asks, self.beside = asks, nn.Parameter(torch.ones(rows, WIDTH))

    def forward(self, x):
        if self.asks and bool(x.isnan().any()):
            raise ValueError
        return Carry(super().forward(x), beside=self.beside * 2)


class Penalty(nn.Linear):
    def forward(self, x, beside):
        return super().forward(x), beside.square().sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [2, SAMPLES, 2 * SAMPLES])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_rows_of_what_belongs_to_no_sample_are_not_taken_for_samples(mesh, asks, rows):
    plan = qs.compile("1f1b" if mesh == "pp=2" else "gpipe", mesh=mesh, microbatches=2)

    def work(transport):
        blocks = [lambda: Beside(rows, asks=asks), lambda: Penalty(WIDTH, WIDTH)]
        engine = Engine(plan, blocks, pair, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport)
        with pytest.raises(MisfitError, match="it goes by what it is given that belongs to no sample"):
            engine.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))

    run_local(2, work)


class Dropping(Block):
    def forward(self, x):
        y = F.dropout(self.inner(x), 0.5)
        return y, self.loss(self, y)


MEAN, VARIANCE = MEANS["of squares"], OTHERS["variance"]


def pair(output, targets):
    return F.mse_loss(output, targets, reduction="sum"), output.numel()


@pytest.mark.parametrize(
    ("mesh", "block", "loss_fn", "options", "said"),
    [
        ("pp=2", lambda: Dropping(MEAN), F.mse_loss, {}, ""),
        ("pp=2", lambda: Block(VARIANCE), F.mse_loss, {"loss_over": "samples"}, r'loss_over="microbatch"'),
        ("pp=2", lambda: Block(VARIANCE), F.mse_loss, {"loss_over": "microbatch"}, ""),
        ("dp=2", lambda: Block(VARIANCE), F.mse_loss, {}, "neither a sum over samples nor a mean"),
        ("tp=2", lambda: Block(SUMS["of squares"]), F.mse_loss, {}, "return a mean over samples"),
        ("tp=2", lambda: Block(SUMS["of squares"]), pair, {}, ""),
        ("dp=2", lambda: Block(MEAN), pair, {}, "return a sum over samples"),
    ],
)
def test_all_ranks_refuse_what_is_neither(mesh, block, loss_fn, options, said):
    plan = qs.compile("1f1b" if mesh == "pp=2" else "gpipe", mesh=mesh, microbatches=2, zero=3 if mesh == "dp=2" else 0)

    def work(transport):
        blocks = [nn.Linear(WIDTH, WIDTH), block()]
        engine = Engine(plan, blocks, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport, **options)
        x = torch.ones(2, WIDTH)  # microbatches of one sample
        with pytest.raises(MisfitError, match=said) if said else nullcontext():
            engine.step(x, x)

    run_local(2, work)


def test_what_is_set_later_is_examined_again():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def work(transport):
        block = Block(MEAN)
        engine = Engine(plan, [block, nn.Linear(WIDTH, WIDTH)], F.mse_loss, torch.optim.SGD, transport=transport)
        x = torch.ones(4, WIDTH)
        for coefficient in (0.9, 0.8):
            engine.step(x, x)
            block.loss = lambda b, y, by=coefficient: by * MEAN(b, y)
        engine.step(x, x)
        before = engine.full_weights()
        engine.evaluate(x, x)
        block.loss = VARIANCE
        engine.evaluate(x, x)
        with pytest.raises(MisfitError, match=r"since block 0 .*loss.* has changed, block 0 .* neither a sum"):
            engine.step(x, x)
        after = engine.full_weights()
        assert all(torch.equal(weight, before[name]) for name, weight in after.items())

    run_local(2, work)


class OtherInEvaluations(Block):
    def __init__(self, loss, other, *, by_mode=True):
        super().__init__(loss)
        self.other, self.by_mode = other, by_mode

    def forward(self, x):
        y = self.inner(x)
        trains = self.training if self.by_mode else torch.is_grad_enabled()
        return y, (self.loss if trains else self.other)(self, y)


SUM = SUMS["of squares"]
EVALUATIONS = {
    "a sum": (MEAN, SUM, True, F.mse_loss, "it is a sum, and"),
    "a mean": (SUM, MEAN, True, pair, "it is a mean over samples, and"),
    "a variance": (MEAN, VARIANCE, True, F.mse_loss, "it is neither"),
    "the last": (MEAN, lambda _, y: y[-1].mean(), True, F.mse_loss, "it is neither"),
    "without a graph": (MEAN, SUM, False, F.mse_loss, "it is a sum, and"),
    "nothing": (SUM, lambda _, y: y.new_zeros(()), True, pair, ""),
    "twice": (MEAN, lambda b, y: 2 * MEAN(b, y).detach(), True, F.mse_loss, ""),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_losses_are_of_one_kind_in_evaluations_too(mesh, trains, name):
    loss, other, by_mode, loss_fn, said = EVALUATIONS[name]
    plan = qs.compile("1f1b" if mesh == "pp=2" else "gpipe", mesh=mesh, microbatches=2)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(8, WIDTH, generator=random, dtype=torch.float64)
    refused = "in evaluations, block 1 .*" + said

    def work(transport):
        blocks = [lambda: nn.Linear(WIDTH, WIDTH), lambda: OtherInEvaluations(loss, other, by_mode=by_mode)]
        options = {"transport": transport, "dtype": torch.float64}
        engine = Engine(plan, blocks, loss_fn, lambda p: torch.optim.SGD(p, lr=0.1), **options)
        mine = x.chunk(engine.num_replicas)[engine.replica]
        with torch.inference_mode(mesh == "dp=2"):
            engine.evaluate(mine, None, outputs=True)
        for _ in range(trains):
            engine.step(mine, mine)
        result = engine.evaluate(mine, mine, outputs=True) if said and trains else None
        inference = torch.inference_mode(mesh == "dp=2")
        with inference, pytest.raises(MisfitError, match=refused) if said else nullcontext():
            engine.evaluate(mine, mine)
        if result is not None:
            with pytest.raises(MisfitError, match=refused):
                result.loss  # noqa: B018

    run_local(2, work)


def test_what_is_set_between_steps_is_examined_in_the_next_evaluation():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def work(transport):
        block, x = OtherInEvaluations(MEAN, MEAN), torch.ones(4, WIDTH)
        engine = Engine(plan, [block, nn.Linear(WIDTH, WIDTH)], F.mse_loss, torch.optim.SGD, transport=transport)
        engine.step(x, x)
        engine.evaluate(x, x)
        block.other = SUM
        engine.step(x, x)
        with pytest.raises(MisfitError, match=r"in evaluations, block 0 .* in training it is a mean"):
            engine.evaluate(x, x)

    run_local(2, work)


def test_evaluations_leave_weights_and_their_masters():
    plan, x = qs.compile("gpipe", mesh="dp=2", microbatches=2), torch.randn(4, WIDTH)

    def work(transport, evaluates):
        options = {"transport": transport, "dtype": torch.bfloat16}
        blocks = [lambda: OtherInEvaluations(MEAN, MEAN)]
        engine = Engine(plan, blocks, F.mse_loss, lambda p: torch.optim.SGD(p, lr=1e-3), **options)
        for _ in range(8):
            engine.step(x, x)
            if evaluates:
                engine.evaluate(x, x)
        return engine.full_weights()

    plain, evaluated = (run_local(2, lambda t, its=its: work(t, its))[0] for its in (False, True))
    assert all(torch.equal(weight, evaluated[name]) for name, weight in plain.items())


class Filled(Block):
    def __init__(self):
        super().__init__(lambda b, y: (MEAN, VARIANCE)[int(b.phase)](b, y))
        self.register_buffer("phase", torch.zeros((), dtype=torch.long))


LOGGER, RATES = logging.getLogger(__name__), functools.lru_cache(lambda: 1.0)


def of_level(block, y):
    return (VARIANCE if LOGGER.isEnabledFor(5) else MEAN)(block, y)


@pytest.mark.parametrize("fills", [True, False])
def test_a_buffer_that_the_loop_fills_and_a_loggers_level_count(fills):
    block = Filled() if fills else Block(of_level)
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    engine = Engine(plan, [block, nn.Linear(WIDTH, WIDTH)], F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1))
    x = torch.randn(4, WIDTH)
    engine.step(x, x)
    try:
        block.phase.fill_(1) if fills else LOGGER.setLevel(1)
        with pytest.raises(MisfitError, match=r"since block 0.*(phase|level) has changed"):
            engine.step(x, x)
    finally:
        LOGGER.setLevel(logging.NOTSET)


@pytest.mark.parametrize("by", [RATES, lambda: len(os.listdir()) > 0])
def test_what_nobody_can_compare_may_not_steer_a_loss(by):
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    blocks = [Block(lambda b, y: by() * MEAN(b, y)), nn.Linear(WIDTH, WIDTH)]
    engine = Engine(plan, blocks, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1))
    x = torch.randn(4, WIDTH)
    with pytest.raises(MisfitError, match=r"it (asks|goes by) .*, and may be another then"):
        engine.step(x, x)


class Given(Block):
    def forward(self, x, extra):
        y = self.inner(x)
        return y, self.loss(y, extra)


def mean_by(weights):
    return lambda y, extra: (y.square().mean(1) * weights(extra)).sum() / weights(extra).sum()


def in_phase(y, phase):
    return y.square().mean() if phase == 0 else y.mean(0).square().mean()


ONES, LABELS = torch.ones(SAMPLES), torch.arange(SAMPLES) % WIDTH
LATER = {
    "weights": (mean_by(lambda w: w), ONES, False),
    "flags": (lambda y, mask: y[mask].square().mean(), ONES.bool(), False),
    "ids that are padding": (mean_by(lambda ids: (ids != 0).double()), LABELS + 1, False),
    "a number in code": (mean_by(lambda ids: (ids != 77).double()), LABELS, False),
    "lengths": (mean_by(lambda n: n.clamp(max=5)), 3 * ONES.long(), False),
    "ignored labels": (F.cross_entropy, LABELS, False),
    "a phase": (in_phase, torch.tensor(0), False),
    "a phase, as a number": (in_phase, torch.tensor(0.0), False),
    "labels of each": (lambda y, t: F.cross_entropy(y, t, reduction="none").mean(), LABELS, True),
    "weights of each": (lambda y, w: (y.square().mean(1) * w).mean(), ONES, True),
    "a scale": (lambda y, scale: scale * y.square().mean(), torch.tensor(1.0), True),
    "a mask of each": (
        lambda y, m: (((y * m).sum(1) / m.sum(1).clamp(min=1)) ** 2).mean(),
        torch.ones(SAMPLES, 4),
        True,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LATER)
def test_extras_that_are_others_later_are_tried(name):
    loss, extra, is_mean = LATER[name]
    assert found_of(Given(loss), extra=extra) == ([Over.SAMPLES] if is_mean else [])


def test_labels_of_one_sample_are_tried_as_others():
    weighed = Supervised(lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([1.0, 2, 3, 0.5]).double()))
    assert not found_of(weighed, targets=torch.full((SAMPLES,), 2))


def test_plain_values_of_extras_are_examined_when_they_come():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def work(transport):
        torch.manual_seed(0)
        block = Given(in_phase)
        engine = Engine(plan, [block, nn.Linear(WIDTH, WIDTH)], F.mse_loss, torch.optim.SGD, transport=transport)
        x = torch.ones(4, WIDTH)
        for _ in range(2):
            engine.step(x, x, extra=0)
        with pytest.raises(
            MisfitError, match=r"since 'extra', which the step is given, has changed, block 0 \(Given\)"
        ):
            engine.step(x, x, extra=1)

    run_local(2, work)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wide", [False, True])
def test_microbatches_of_one_sample_hide_nothing(wide):
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=4)

    def above(block, y):
        return y[y > 0].square().mean() if wide else y.norm()

    def work(transport):
        engine = Engine(plan, [Block(above)], F.mse_loss, torch.optim.SGD, transport=transport)
        with pytest.raises(MisfitError, match=r"block 0 \(Block\) gives a loss.*neither a sum"):
            engine.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))

    run_local(1, work)


class Late(nn.Linear):
    gives = False

    def forward(self, x):
        y = super().forward(x)
        return (y, y.square().mean()) if self.gives else y


@pytest.mark.parametrize(("microbatches", "loss_over"), [(1, None), (2, "samples"), (2, "microbatch")])
def test_a_loss_that_begins_later_is_refused_on_all_ranks(microbatches, loss_over):
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=microbatches)

    def work(transport):
        block, options = Late(WIDTH, WIDTH), {"transport": transport, "loss_over": loss_over}
        engine = Engine(plan, [block, nn.Linear(WIDTH, WIDTH)], F.mse_loss, torch.optim.SGD, **options)
        x = torch.ones(4, WIDTH)
        engine.step(x, x)
        block.gives = True
        refused = pytest.raises(MisfitError, match=r"block 0 \(Late\) returns a loss.*new_zeros\(\(\)\)")
        with nullcontext() if loss_over == "microbatch" else refused:
            engine.step(x, x)

    run_local(2, work)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_a_block_with_targets_goes_with_targets_that_count_evenly(mesh):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, targets):
            y = self.inner(x)
            return y, F.cross_entropy(y, targets)

    has_stages = "pp" in mesh
    losses = (0, 1) if has_stages else ()
    plan = qs.compile("1f1b" if has_stages else "gpipe", mesh=mesh, microbatches=2, losses=losses)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(8, WIDTH, generator=random, dtype=torch.float64)
    targets = torch.randint(0, WIDTH, (8,), generator=random)
    uneven = targets.clone()
    uneven[:1] = -100

    def work(transport):
        options = {"transport": transport, "dtype": torch.float64}
        engine = Engine(plan, [Deep, Deep], lambda o, t: o.square().mean(), torch.optim.SGD, **options)
        mine = slice(engine.replica * 4, engine.replica * 4 + 4)
        loss = engine.step(x[mine], targets[mine]).loss.item()
        with pytest.raises(MisfitError, match="a mean over targets"):
            engine.step(x[mine], uneven[mine])
        return loss

    model = build_model([Deep, Deep], 0, torch.float64)
    y, first = model[0](x, targets)
    z, second = model[1](y, targets)
    for loss in run_local(len(mesh.split(",")) * 2, work):
        assert loss == pytest.approx((z.square().mean() + first + second).item(), rel=1e-12)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(200))
def test_no_draw_hides_a_batch(seed):
    for name in ("variance", "balance", "near the mean", "those above"):
        assert not found_of(Block(OTHERS[name]), seed=seed)
    assert found_of(Block(MEANS["hinge"]), seed=seed) == [Over.SAMPLES]
