"""Trial runs, and a split, leave no trace in blocks; loose tensors that collect a gradient are refused."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import quintsched as qs
from quintsched.runtime import split
from quintsched.runtime.blocks.block_builders import build_block, build_model
from quintsched.runtime.blocks.shape_inference import trace_shapes
from quintsched.runtime.blocks.trees import TreeSpec
from quintsched.runtime.blocks.without_side_effects import untouched
from quintsched.runtime.comm.random_generators import draws_undone

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import check_equality, random_batch, sgd, train_ranks


class Layer(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.fc, self.held = nn.Linear(4, 4), {"delta": delta}

    def forward(self, x):
        return self.fc(x + self.held["delta"])


class Row(nn.Module):
    delta = 0.0

    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x):
        x = x + self.delta
        for layer in self.layers:
            x = layer(x)
        return x


def loose():
    return torch.zeros(4, requires_grad=True)


def take_step(blocks, loss=F.mse_loss):
    plan, x = qs.compile("1f1b", mesh="pp=2", microbatches=2), torch.ones(2, 4)
    train_ranks(plan, blocks, loss, sgd, [(x, x)])


def test_a_loose_leaf_of_a_block_a_model_or_a_loss_is_refused():
    with pytest.raises(qs.MisfitError, match=r"block 0 \(Layer\) goes by .*held\['delta'\].*nn.Parameter"):
        take_step([Layer(loose()), nn.Linear(4, 4)])
    model = Row(lambda: nn.Linear(4, 4))
    model.delta = delta = loose()
    with pytest.raises(qs.MisfitError, match=r"model \(Row\).delta, a tensor with requires_grad"):
        split(model, example=torch.ones(2, 4))
    with pytest.raises(qs.MisfitError, match="loss_fn goes by"):
        take_step([nn.Linear(4, 4), nn.Linear(4, 4)], lambda output, targets: F.mse_loss(output, targets) + delta.sum())


def test_a_trial_leaves_no_gradient():
    layer = Layer(loose())
    layer.fc.bias.grad = kept = torch.ones(4)
    with untouched(layer):
        layer(torch.ones(2, 4)).sum().backward()
    assert layer.fc.weight.grad is None
    assert layer.held["delta"].grad is None
    assert layer.fc.bias.grad is kept
    assert kept.tolist() == [1, 1, 1, 1]


WIDTH = 4


class Counting(nn.Module):
    """Anneals by a counter, and keeps what it was given in dicts, lists, and a tensor."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(WIDTH, WIDTH), 0, {"calls": []}
        self.average = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x):
        self.calls += 1
        self.seen["calls"].append(self.calls)
        if not x.is_meta:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x + self.average.to(x.device)) / len(self.seen["calls"])


class Initialised(nn.Module):
    """Makes a table at the first call, and takes its first input's mean for its bias."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.initialised, self.table = False, None

    def forward(self, x):
        if not self.initialised:
            self.initialised = True
            self.table = torch.arange(float(x.shape[1]), dtype=x.dtype, device=x.device).sin()
            self.start(x.detach())
        return self.layer(x * self.table + self.bias)

    def start(self, x):
        with torch.no_grad():
            self.bias.copy_(-x.mean(0))


Looking = of_kind(Counting, lambda self, x: Counting.forward(self, x * (2 if x.sum().item() > 0 else 1)))
"""Looks at data, so that it cannot run on the meta device."""


class ByData(Initialised):
    """The same, but that it has another tensor afterwards, and keeps a graph on a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def start(self, x):
        self.bias.data = -x.mean(0)
        self.mean.mul_(0.9).add_(x.requires_grad_().mean(0), alpha=0.1)


Writing = of_kind(Counting, lambda self, x: self.layer(x * 2 if torch.is_grad_enabled() else x.mul_(2)))
"""Writes into its input where no gradients are recorded."""


class Renewing(Counting):
    """Replaces a buffer, and draws."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps = self.steps + 1
        return super().forward(x) * torch.rand(WIDTH, dtype=x.dtype)


def states(model):
    """Return copies of all that modules hold, as lists, by which they can be compared."""
    held = [{n: v for n, v in vars(module).items() if not n.startswith("_")} for module in model.modules()]
    return tree_map_only(Tensor, Tensor.tolist, copy.deepcopy([held, dict(model.state_dict())]))


@pytest.mark.parametrize("kind", [Initialised, ByData, Looking, Writing, Renewing])
def test_a_split_leaves_the_model_as_it_is(kind):
    model, x = Row(kind).double(), 100 + torch.randn(2, WIDTH, dtype=torch.float64)
    model.layers[1].eval()
    before, given, generator = states(model), x.clone(), torch.get_rng_state()
    weights = [id(parameter) for parameter in model.parameters()]
    blocks = split(model, example=x)
    assert states(model) == before
    assert [id(parameter) for parameter in model.parameters()] == weights
    assert not any(buffer.requires_grad for buffer in model.buffers())
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [block.training for block in blocks] == [True, False, True]
    assert not any(getattr(block, "initialised", False) or getattr(block, "calls", 0) for block in blocks)


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
@pytest.mark.parametrize("block", [Counting, Initialised, Looking])
@pytest.mark.parametrize("is_built", [False, True])
def test_what_blocks_keep_in_attributes_is_as_in_one_process(block, mesh, is_built):
    plan, batches = qs.compile("1f1b", mesh=mesh, microbatches=2), [random_batch(step, 8, WIDTH) for step in range(2)]
    blocks = list(build_model([block, block], 0, torch.float64)) if is_built else [block, block]
    check_equality(plan, blocks, nn.MSELoss(), sgd, batches, microbatches=2)


def test_weights_and_attributes_are_put_back_also_behind_an_error() -> None:
    block = Initialised()
    tables = [torch.ones(2)]
    block.cache = {"tables": tables}
    memory, state = block.bias.data_ptr(), torch.get_rng_state()

    def spoil() -> None:
        with untouched(block):
            block(torch.randn(2, WIDTH))
            tables.append(torch.ones(1))
            tables[0].zero_()
            block.layer.weight.data = torch.zeros(WIDTH, WIDTH)
            block.extra = 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spoil()
    assert not block.initialised
    assert not hasattr(block, "extra")
    assert block.bias.data_ptr() == memory
    assert not block.bias.any()
    assert block.layer.weight.any()
    assert [table.tolist() for table in tables] == [[1.0, 1.0]]
    assert torch.equal(torch.get_rng_state(), state)


def draws() -> list[float]:
    return [float(torch.rand(())), random.random(), np.random.rand()]


Drawn = of_layers(
    "Drawn",
    lambda: {"weight": nn.Parameter(torch.tensor([*draws()]))},
    lambda self, x: x * sum(draws()) * self.weight.sum(),
)
"""A block whose weights and forward draw from each generator of the process."""


def test_what_is_built_or_tried_draws_nothing() -> None:
    with draws_undone():
        expected = draws()
    with draws_undone():
        built = [build_block(Drawn, number) for number in (0, 1, 0)]
        trace_shapes(built, TreeSpec.from_tree(torch.ones(2, 3)), {})
        with untouched(built[0]):
            built[0](torch.ones(2, 3))
        assert draws() == expected
    assert torch.equal(built[0].weight, built[2].weight)
    assert (built[0].weight != built[1].weight).all()


Cycled = of_kind(Layer, lambda self, x: self.fc(x * next(self.held["delta"])))


@pytest.mark.parametrize("held", [itertools.cycle([1.0, 2.0]), iter([1.0] * 100), itertools.count(1)])
def test_an_iterator_that_a_block_holds_is_refused(held):
    with pytest.raises(qs.MisfitError, match=r"block 0 \(Layer\) goes by .*held\['delta'\], a .*keep the items"):
        take_step([Cycled(held), nn.Linear(4, 4)])
    with pytest.raises(qs.MisfitError, match=r"loss_fn goes by .*held.*, a .*keep the items"):
        take_step([nn.Linear(4, 4), nn.Linear(4, 4)], lambda output, targets: F.mse_loss(output, targets) * next(held))
