"""Models of one's own, cut by their lists of layers, by names, or as they are: the chain is the model."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine, build_model, run_local, split
from quintsched.runtime.splitting.split_proof import chain

from ...helpers.training import check_equality, sgd
from .models import HIDDEN, IDS, Layer, NanoGPT


def ids(samples=4, length=6):
    return torch.randint(0, IDS, (samples, length), generator=torch.Generator().manual_seed(1))


def loss(output, targets):
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def check_ids(model, plan, steps=3, **how):
    check_equality(plan, model, loss, sgd, [(ids(8), ids(8))] * steps, cut=partial(split, example=ids()), **how)


@pytest.fixture
def nano():
    torch.manual_seed(0)
    return NanoGPT().double()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "mesh"), [("zb-h1", "pp=4"), ("interleaved-1f1b", "pp=2")])
def test_a_split_model_trains_as_in_one_piece(nano, schedule, mesh):
    plan = qs.compile(schedule, mesh=mesh, microbatches=4)
    check_ids(nano, plan)


def test_blocks_have_the_models_names_and_ties(nano):
    blocks = split(nano, example=ids())
    assert len(blocks) == 5
    own = dict(nano.named_parameters(remove_duplicate=False))
    for number, block in enumerate(blocks):
        for name, weight in block.named_parameters():
            assert torch.equal(own[blocks.own_names[f"{number}.{name}"]], weight)
    assert [*blocks.tied.values()] == [("0.transformer.wte.weight", "4.lm_head.weight")]
    assert nano.lm_head.weight is nano.transformer.wte.weight


class Shared(nn.Module):
    """Hidden states that layers far behind take again."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(IDS, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(HIDDEN, IDS)

    def forward(self, ids):
        first = x = self.embed(ids)
        second = first.sigmoid()
        for number, layer in enumerate(self.layers):
            x = layer(x, second if number in (1, 3) else first if number == 2 else 1.0)
        return self.head(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["pp=4", "pp=2"])
def test_values_of_earlier_blocks_ride_along(mesh):
    torch.manual_seed(0)
    model = Shared().double()
    assert len(split(model, example=ids())) == 6
    check_ids(model, qs.compile("1f1b", mesh=mesh, microbatches=2))


class Mixing(Shared):
    """Model whose code after the layers uses the embedding again."""

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
    with pytest.raises(MisfitError, match=said):
        split(asking(Mixing), example=ids())
    with pytest.raises(MisfitError, match=said):
        split(Mixing(), blocks=["layers.*"], example=ids())


def test_a_sequential_is_its_children():
    blocks = split(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2))))
    assert len(blocks) == 3
    names = ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    assert blocks.own_names == dict(zip(names, names, strict=True))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(IDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.body = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, IDS)

    def forward(self, ids):
        return self.head(self.norm(self.body[2](self.body[1](self.body[0](self.embed(ids))))))


def test_blocks_by_name():
    blocks = split(Plain(), blocks=["embed", "body.*", "norm", "head"], example=ids())
    assert len(blocks) == 6
    found = [name for name in blocks.own_names.values() if name.startswith("body")]
    assert found == ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"]


@pytest.mark.parametrize("kind", [Plain, Mixing])
def test_a_model_whose_walk_finds_no_blocks_is_traced(kind):
    torch.manual_seed(0)
    model = kind().double()
    blocks = split(model, example=ids())
    assert len(blocks) > 2
    torch.testing.assert_close(chain(blocks, ids(8)), model(ids(8)), rtol=0, atol=0)
    assert sorted(set(blocks.own_names.values())) == sorted(model.state_dict())


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
    with pytest.raises((MisfitError, UsageError), match=said):
        split(model, **arguments)


def test_a_model_of_ones_own_is_built_without_weights():
    blocks = split(Shared, example=ids())
    model = build_model(blocks, seed=1)
    assert {name for name, _ in model.named_parameters()} == set(blocks.own_names)
    assert not any(p.is_meta or p.isnan().any() for p in model.parameters())


def test_shapes_are_found_in_the_type_that_is_trained_in(nano):
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)

    def work(transport):
        blocks = split(copy.deepcopy(nano).float(), example=ids())
        engine = Engine(plan, blocks, loss, sgd, dtype=torch.bfloat16, transport=transport)
        return engine.step(ids(), ids()).loss.item()

    first, second = run_local(2, work)
    assert first == second == pytest.approx(loss(nano(ids()), ids())[0].item() / ids().numel(), rel=0.02)
