"""Losses that blocks return are sums over samples, or means over them, as the loss function is; others are refused.

Extras with as many rows as there are samples are cut where they belong to these, and refused where they do not.
"""

import functools
import os
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime import Carry, run_local
from quintsched.runtime.examine.block_losses import examine_block_loss
from quintsched.runtime.examine.trial_block_runs import TriedBlock
from quintsched.runtime.losses.loss_reductions import Over
from quintsched.runtime.parallel.cut_proofs import trial_inputs

from ...helpers.blocks import of_kind
from ...helpers.training import train_alone
from ..trials import engine_of, on_ranks, ones, refused, require_verdict, sgd, taken
from .loss_blocks import EVERY, MEAN, MEANS, OTHERS, SAMPLES, SUMS, VARIANCE, WIDTH, Block, near, pair


def found_of(block, samples=SAMPLES, seed=0, **extras):
    torch.manual_seed(seed)
    block = block.double()
    before = {name: weight.clone() for name, weight in block.state_dict().items()}
    extras = {name: trial_inputs.GivenTree([trial_inputs.TrialInput(extra)]) for name, extra in extras.items()}
    inputs = trial_inputs.TrialInput(torch.randn(samples, WIDTH, dtype=torch.float64))
    arrival = trial_inputs.Arrival(trial_inputs.GivenTree([inputs]), {}, extras)

    def alike(some):
        torch.manual_seed(some.start)
        return nullcontext()

    tried = TriedBlock(lambda _, b, x, taken: b(x, **taken), 1, block, alike)
    found = examine_block_loss(tried, arrival, samples)
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


class Beside(nn.Linear):
    def __init__(self, rows, *, asks):
        super().__init__(WIDTH, WIDTH)
        self.asks, self.beside = asks, nn.Parameter(torch.ones(rows, WIDTH))

    def forward(self, x):
        if self.asks and bool(x.isnan().any()):
            raise ValueError
        return Carry(super().forward(x), beside=self.beside * 2)


Penalty = of_kind(nn.Linear, lambda self, x, beside: (nn.Linear.forward(self, x), beside.square().sum()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [2, SAMPLES, 2 * SAMPLES])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_rows_of_what_belongs_to_no_sample_are_not_taken_for_samples(mesh, asks, rows):
    blocks = [lambda: Beside(rows, asks=asks), lambda: Penalty(WIDTH, WIDTH)]
    assert "it goes by what it is given that belongs to no sample" in refused(blocks, ones(4, WIDTH), pair, mesh)


Dropping = of_kind(Block, lambda self, x: (y := F.dropout(self.inner(x), 0.5), self.loss(self, y)))


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
    options = options | {"mesh": mesh, "zero": 3 if mesh == "dp=2" else 0}
    batches = ones(4 if mesh == "dp=2" else 2, WIDTH)  # microbatches of one sample

    require_verdict(said, lambda: [nn.Linear(WIDTH, WIDTH), block()], batches, loss_fn, **options)


def test_what_is_set_later_is_examined_again():
    def work(transport):
        block, x = Block(MEAN), torch.ones(4, WIDTH)
        engine = engine_of(transport, [block, nn.Linear(WIDTH, WIDTH)])
        for coefficient in (0.9, 0.8, 0.8):
            engine.step(x, x)
            block.loss = lambda b, y, by=coefficient: by * MEAN(b, y)
        before = engine.full_weights()
        engine.evaluate(x, x)
        block.loss = VARIANCE
        engine.evaluate(x, x)
        with pytest.raises(MisfitError, match=r"since block 0 .*loss.* has changed, block 0 .* neither a sum"):
            engine.step(x, x)
        assert all(torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())

    run_local(2, work)


Given = of_kind(Block, lambda self, x, extra: (y := self.inner(x), self.loss(y, extra)))


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
    "a mask of each": (lambda y, m: ((y * m).sum(1) / m.sum(1)).square().mean(), torch.ones(SAMPLES, WIDTH), True),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LATER)
def test_extras_that_are_others_later_are_tried(name):
    loss, extra, is_mean = LATER[name]
    assert found_of(Given(loss), extra=extra) == ([Over.SAMPLES] if is_mean else [])


class Late(nn.Linear):
    gives = False

    def forward(self, x):
        y = super().forward(x)
        return (y, y.square().mean()) if self.gives else y


LATER_LOSS = r"block 0 \(Late\) returns a loss.*new_zeros\(\(\)\)"


@pytest.mark.parametrize(
    ("microbatches", "loss_over", "said"), [(1, None, LATER_LOSS), (2, "samples", LATER_LOSS), (2, "microbatch", "")]
)
def test_a_loss_that_begins_later_is_refused_on_all_ranks(microbatches, loss_over, said):
    def change(blocks, number):
        blocks[0].gives = number == 1

    more = {"microbatches": microbatches, "loss_over": loss_over, "change": change}
    require_verdict(said, [Late(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], ones(4, WIDTH, steps=2), **more)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(200))
def test_no_draw_hides_a_batch(seed):
    for name in ("variance", "balance", "near the mean", "those above"):
        assert not found_of(Block(OTHERS[name]), seed=seed)
    assert found_of(Block(MEANS["hinge"]), seed=seed) == [Over.SAMPLES]


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
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    refusal = "in evaluations, block 1 .*" + said

    def work(engine):
        mine = x.chunk(engine.num_replicas)[engine.replica]
        with torch.inference_mode(mesh == "dp=2"):
            engine.evaluate(mine, None, outputs=True)
        for _ in range(trains):
            engine.step(mine, mine)
        result = engine.evaluate(mine, mine, outputs=True) if said and trains else None
        inference = torch.inference_mode(mesh == "dp=2")
        with inference, pytest.raises(MisfitError, match=refusal) if said else nullcontext():
            engine.evaluate(mine, mine)
        if result is not None:
            with pytest.raises(MisfitError, match=refusal):
                result.loss  # noqa: B018

    blocks = [lambda: nn.Linear(WIDTH, WIDTH), lambda: OtherInEvaluations(loss, other, by_mode=by_mode)]
    on_ranks(work, blocks, loss_fn, mesh=mesh, dtype=torch.float64)


class Filled(Block):
    def __init__(self):
        super().__init__(lambda b, y: (MEAN, VARIANCE)[int(b.phase)](b, y))
        self.register_buffer("phase", torch.zeros((), dtype=torch.long))


RATES = functools.lru_cache(lambda: 1.0)


def test_a_buffer_that_the_loop_fills_counts():
    def change(blocks, number):
        if number:
            blocks[0].phase.fill_(1)

    batches = [(torch.randn(4, WIDTH),) * 2] * 2
    said = refused([Filled(), nn.Linear(WIDTH, WIDTH)], batches, mesh="pp=1", change=change)
    assert re.search(r"since block 0.*phase has changed", said)


@pytest.mark.parametrize("by", [RATES, lambda: len(os.listdir()) > 0])
def test_what_nobody_can_compare_may_not_steer_a_loss(by):
    said = refused([Block(lambda b, y: by() * MEAN(b, y))], [(torch.randn(4, WIDTH),) * 2], mesh="pp=1")
    assert re.search(r"it (asks|goes by) .*, and may be another then", said)


ROWS = 8


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, ROWS)
        self.positions = nn.Embedding(ROWS, ROWS)


def attends(self, x, extra):
    h = self.fc(x)
    return h + (h.mean(1) @ extra.T).softmax(-1)[:, None, :] @ extra


MEMORY = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NUMBERS = torch.arange(ROWS)
OF_NO_SAMPLE = {
    "memory": (attends, MEMORY),
    "positions": (lambda self, x, extra: self.fc(x) + self.positions(extra), NUMBERS),
    "scale": (lambda self, x, extra: self.fc(x) * extra, MEMORY[0]),
}
OF_SAMPLES = {
    "weights": (lambda self, x, extra: self.fc(x) * extra[:, None, None], MEMORY[0]),
    "domains": (lambda self, x, extra: self.fc(x) + self.positions(extra)[:, None], NUMBERS % 3),
}


def given(forward, extra):
    """Return blocks, and a batch."""
    torch.manual_seed(0)
    blocks = [of_kind(Uses, forward)().double(), nn.Linear(ROWS, 3).double()]
    inputs = torch.randn(ROWS, ROWS, 6, dtype=torch.float64)
    return blocks, [(inputs, torch.randn(ROWS, ROWS, 3, dtype=torch.float64), {"extra": extra})]


def require_equality(forward, extra, microbatches):
    blocks, batches = given(forward, extra)
    expected = train_alone(blocks, F.mse_loss, sgd, batches).losses  # which is given the extra whole
    assert taken(blocks, batches, microbatches=microbatches) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("microbatches", [2, ROWS])
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_those_of_samples_are_cut(name, microbatches):
    require_equality(*OF_SAMPLES[name], microbatches)


@pytest.mark.parametrize("microbatches", [2, ROWS])
@pytest.mark.parametrize("name", OF_NO_SAMPLE)
def test_those_of_no_sample_are_refused(name, microbatches):
    said = refused(*given(*OF_NO_SAMPLE[name]), microbatches=microbatches)
    assert "uses 'extra' for all samples alike" in said or "cannot take" in said


def of_list(self, x, extra):
    return torch.stack([row * extra[k] for k, row in enumerate(self.fc(x))])


def test_lists_with_an_entry_for_each_sample_are_refused():
    of_each = list(range(ROWS))
    assert "extra is a list of 8 values beside as many samples" in refused(*given(of_list, of_each))
    taken(*given(of_list, of_each), microbatches=1)
    taken(*given(of_list, [*of_each, 8]))
