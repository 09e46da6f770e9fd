"""Models of one's own, cut by lists of layers, by names, or as they are: the chain is the model."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import build_model, split
from quintsched.runtime.splitting.split_proof import chain

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import check_equality, run_engines, sgd
from .models import HIDDEN, IDS, WIDTH, Block, Layer, NanoGPT, Traced, Walked
from .models import loss as loss_of_first


def ids(samples=4, length=6):
    return torch.randint(0, IDS, (samples, length), generator=torch.Generator().manual_seed(1))


def loss(output, targets):
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@pytest.fixture
def nano():
    torch.manual_seed(0)
    return NanoGPT().double()


def test_a_split_model_trains_as_in_one_piece(nano):
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=2)
    check_equality(plan, nano, loss, sgd, [(ids(8), ids(8))] * 2, cut=partial(split, example=ids()))


def test_blocks_have_the_models_names_and_ties(nano):
    blocks = split(nano, example=ids())
    assert len(blocks) == 5
    own = dict(nano.named_parameters(remove_duplicate=False))
    for number, block in enumerate(blocks):
        for name, weight in block.named_parameters():
            assert torch.equal(own[blocks.own_names[f"{number}.{name}"]], weight)
    assert [*blocks.tied.values()] == [("0.transformer.wte.weight", "4.lm_head.weight")]
    assert nano.lm_head.weight is nano.transformer.wte.weight


class Mixing(nn.Module):
    """Model whose code after the layers uses the embedding again."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(IDS, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(HIDDEN, IDS)

    def forward(self, ids):
        first = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, 1.0)
        return self.head(x + first)


def asking(kind):
    """A kind of model that depends on values as well, so that it cannot be traced."""

    class Asking(kind):
        def forward(self, idx):
            return super().forward(idx) if idx.sum() > 0 else None

    return Asking()


def test_what_cannot_be_found_again_is_refused():
    said = r"what follows the last layer, 'layers.3', uses more than what that gives"
    with pytest.raises(qs.MisfitError, match=said):
        split(asking(Mixing), example=ids())
    with pytest.raises(qs.MisfitError, match=said):
        split(Mixing(), blocks=["layers.*"], example=ids())


Plain = of_layers(
    "Plain",
    lambda: {
        "embed": nn.Embedding(IDS, HIDDEN),
        "norm": nn.LayerNorm(HIDDEN),
        "body": nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)),
        "head": nn.Linear(HIDDEN, IDS),
    },
    lambda self, ids: self.head(self.norm(self.body[2](self.body[1](self.body[0](self.embed(ids)))))),
)


def test_blocks_by_name():
    blocks = split(Plain(), blocks=["embed", "body.*", "norm", "head"], example=ids())
    assert len(blocks) == 6
    found = [name for name in blocks.own_names.values() if name.startswith("body")]
    assert found == ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"]


@pytest.mark.parametrize("kind", [Plain, Mixing])
def test_a_model_whose_walk_finds_no_blocks_is_traced(kind):
    model = kind().double()
    blocks = split(model, example=ids())
    assert len(blocks) > 2
    torch.testing.assert_close(chain(blocks, ids(8)), model(ids(8)), rtol=0, atol=0)
    assert sorted(set(blocks.own_names.values())) == sorted(model.state_dict())


class TwoWays(nn.Module):
    """Two values cross every cut."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.ModuleList([Block() for _ in range(3)]), nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        y = x.flip(1)
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y) + 0.5 * x
        return x * y


Telling = of_kind(
    Block,
    lambda self, told: {
        "x": Block.forward(self, told["x"]),
        "count": told["count"] + 1,
        "sum": told["sum"] + told["x"].mean(),
    },
)


class Dicts(nn.Module):
    """Its layers pass a dictionary, of which one value is a number of Python's."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Telling() for _ in range(3)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        told = {"x": x, "count": 0, "sum": x.mean()}
        for layer in self.layers:
            told = layer(told)
        return self.head(told["x"]) * told["count"] + told["sum"]


@pytest.mark.parametrize("kind", [TwoWays, Dicts])
def test_all_that_crosses_a_cut_is_sent(kind):
    model, plan, x = kind().double(), qs.compile("zb-h1", mesh="pp=2", microbatches=4), drawn(8, 3, WIDTH)
    check_equality(plan, model, loss_of_first, sgd, [(x, x[:, 0, 0])], microbatches=4, cut=split)


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        (asking(Plain), {"example": ids()}, "has no list of layers"),
        (Plain(), {"blocks": ["embed", "boddy.*"], "example": ids()}, "'boddy.*' is no module"),
        (Plain(), {"blocks": ["body", "body.0"], "example": ids()}, "is a part of"),
        (asking(NanoGPT), {}, "give an example"),
        (NanoGPT, {"example": ids()}, "nothing sets"),  # a weight of a model that is built without weights
    ],
)
def test_what_is_wrong_is_said(model, arguments, said):
    with pytest.raises((qs.MisfitError, qs.UsageError), match=said):
        split(model, **arguments)


def test_a_model_of_ones_own_is_built_without_weights():
    blocks = split(Plain, blocks=["embed", "body.*", "norm", "head"], example=ids())
    model = build_model(blocks, seed=1)
    assert {name for name, _ in model.named_parameters()} == set(blocks.own_names)
    assert not any(p.is_meta or p.isnan().any() for p in model.parameters())


class Model(Walked):
    def __init__(self):
        super().__init__()
        self.null = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.ends(self.stem(x))

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
        return self.ends(self.stem(x) * (cond[:, None] if is_given else cond)) * (1 if is_given else 3)


def test_an_input_that_a_step_leaves_out_has_its_default():
    check_steps(Optional, F.mse_loss, [{"x": X}, {"x": X, "cond": COND}, {"x": X}], {"x": X, "cond": COND})


def test_weights_that_the_example_did_not_lead_to_are_refused():
    def forward(self, x, cond=None):
        return self.ends(self.stem(x) + (self.null if cond is None else cond[:, None]))

    with pytest.raises(qs.MisfitError, match=r"the forward of Model uses 'null' in this step"):
        check_steps(of_kind(Model, forward), F.mse_loss, [{"x": X, "cond": COND}, {"x": X}])


def test_the_loss_has_all_that_a_model_returns():
    returns = of_kind(Model, lambda self, x: {"out": Model.forward(self, x), "all": [self.stem(x).square()]})

    def loss_of_all(output, targets):
        return F.mse_loss(output["out"], targets) + output["all"][0].mean()

    check_steps(returns, loss_of_all, [{"x": X}])


Gated = of_kind(Model, lambda self, x, gate: self.ends(self.stem(x) * gate))


class GatedTraced(Gated):
    make_layers = Traced.make_layers

    def ends(self, x):
        return self.head(self.second(self.first(x)))


@pytest.mark.parametrize("kind", [Gated, GatedTraced])
def test_inputs_may_be_given_to_a_step_by_their_names(kind):
    model, x, gate, y = kind().double(), drawn(4, 3), drawn(4, 1), drawn(4, 2)
    expected = F.mse_loss(model(x, gate), y).item()

    def blocks():
        return split(copy.deepcopy(model), example={"x": x[:2], "gate": gate[:2]})

    def work(engine):
        found = [engine.evaluate({"x": x, "gate": gate}, y), engine.evaluate(x, y, gate=gate)]
        with pytest.raises(qs.MisfitError, match=r"gate=…"):
            engine.evaluate(x, y)
        return [result.loss.item() for result in found]

    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    assert run_engines(plan, blocks, work, F.mse_loss) == [pytest.approx([expected] * 2)] * 2
