"""Inputs that a step leaves out, and what a model returns: the loss has what it has in one process."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local, split
from quintsched.runtime.splitting.split_proof import chain

from ...helpers.training import check_equality, run_model, sgd
from .models import Block

WIDTH = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.null = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.ends(self.embed(x))

    def ends(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).double()


def check_steps(kind, loss, batches, example=None, **settings):
    """Train on two stages as in one process; a batch is inputs by name."""
    torch.manual_seed(0)
    model, targets, plan = kind().double(), drawn(4, 2), qs.compile("1f1b", mesh="pp=2", microbatches=2)
    given = [(batch["x"], targets, {name: t for name, t in batch.items() if name != "x"}) for batch in batches]
    cut = partial(split, example=example or batches[0])
    check_equality(plan, model, loss, sgd, given, cut=cut, **settings)


X, COND = drawn(4, 3), drawn(4)


class Optional(Model):
    """The first block scales by an input, or its default; behind the layers matters whether it was given."""

    def forward(self, x, cond=2.0):
        is_given = isinstance(cond, torch.Tensor)
        return self.ends(self.embed(x) * (cond[:, None] if is_given else cond)) * (1 if is_given else 3)


class Otherwise(Model):
    """Without the input the forward takes a weight that it takes nowhere else."""

    def forward(self, x, cond=None):
        return self.ends(self.embed(x) + (self.null if cond is None else cond[:, None]))


def test_an_input_that_a_step_leaves_out_has_its_default():
    check_steps(Optional, F.mse_loss, [{"x": X}, {"x": X, "cond": COND}, {"x": X}], {"x": X, "cond": COND})


def test_weights_that_the_example_did_not_lead_to_are_refused():
    with pytest.raises(MisfitError, match=r"the forward of Otherwise uses 'null' in this step"):
        check_steps(Otherwise, F.mse_loss, [{"x": X, "cond": COND}, {"x": X}])


class Tuple(Model):
    def forward(self, x):
        hidden = self.embed(x)
        return super().forward(x), hidden.square()


class Dict(Tuple):
    def forward(self, x):
        out, hidden = super().forward(x)
        return {"out": out, "all": [hidden]}


class Penalised(Model):
    """Model that returns a number per microbatch, of which the loss cannot know whether it is a mean."""

    def forward(self, x):
        out = super().forward(x)
        return out, out.square().mean()


@dataclass
class Output:
    out: torch.Tensor


class Object(Model):
    def forward(self, x):
        return Output(super().forward(x))


def loss_of_all(output, targets):
    if isinstance(output, dict):
        return F.mse_loss(output["out"], targets) + output["all"][0].mean()
    return F.mse_loss(output[0], targets) + output[1].mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Tuple, Dict])
def test_the_loss_has_all_that_a_model_returns(kind):
    check_steps(kind, loss_of_all, [{"x": X}])


def test_a_mean_of_each_microbatch_beside_the_output_counts_as_is_said():
    check_steps(Penalised, loss_of_all, [{"x": X}], loss_over="samples")


class Labelled(Model):
    def forward(self, x, labels):
        return super().forward(x) - labels


class Nested(Model):
    def forward(self, batch):
        return super().forward(batch["x"]) * batch["w"][:, None]


class Guessing(Model):
    """Model that calls layers so that they raise, which a trace does not see."""

    def ends(self, x):
        for layer in self.layers:
            try:
                x = layer(x, 1.0)
            except TypeError:
                x = layer(x)
        return self.head(x)


def test_inputs_named_as_targets_ride_along_and_hooks_on_inputs_see_names():
    model, labels = Labelled().double(), drawn(4, 2)
    blocks = split(model, example={"x": X, "labels": labels})
    assert torch.equal(run_model(nn.ModuleList(blocks), X, None, {"labels": labels})[0], model(X, labels))
    model.register_forward_pre_hook(lambda _, a, kw: (a, {"labels": kw["labels"] + 1}), with_kwargs=True)
    assert len(split(model, example={"x": X, "labels": labels})) == 4


def test_a_batch_may_be_the_one_input():
    model, batch = Nested().double(), {"x": X, "w": COND}
    assert torch.equal(chain(split(model, example={"batch": batch}), batch), model(batch))


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Guessing, "do not run, and the model does"), (Object, r"of Object returns a Output; return tensors, or tuples")],
)
def test_layers_that_raise_and_outputs_that_are_no_tree_are_refused(kind, says):
    with pytest.raises(MisfitError, match=says):
        split(kind(), example=X.float())


class Gated(Model):
    def forward(self, x, gate):
        return self.ends(self.embed(x) * gate)


class GatedTraced(Gated):
    def __init__(self):
        super().__init__()
        (self.first, self.second), self.layers = self.layers, None

    def ends(self, x):
        return self.head(self.second(self.first(x)))


@pytest.mark.parametrize("kind", [Gated, GatedTraced])
def test_inputs_may_be_given_to_a_step_by_their_names(kind):
    torch.manual_seed(0)
    model, x, gate, y = kind().double(), drawn(4, 3), drawn(4, 1), drawn(4, 2)
    expected = F.mse_loss(model(x, gate), y).item()

    def work(transport):
        blocks = split(copy.deepcopy(model), example={"x": x[:2], "gate": gate[:2]})
        plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
        engine = Engine(plan, blocks, F.mse_loss, sgd, transport=transport)
        found = [engine.evaluate({"x": x, "gate": gate}, y), engine.evaluate(x, y, gate=gate)]
        with pytest.raises(MisfitError, match=r"gate=…"):
            engine.evaluate(x, y)
        return [result.loss.item() for result in found]

    assert run_local(2, work) == [pytest.approx([expected] * 2)] * 2
