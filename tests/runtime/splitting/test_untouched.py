"""Side effects of a forward on its model are undone after the split, and the proof's two runs start alike."""

import copy

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, run_local, split

WIDTH = 4


class Starting(nn.Module):
    """Its weight starts from the first batch, as in Glow; it asks for a number, which the meta device has not."""

    def __init__(self):
        super().__init__()
        self.shift, self.fc = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("done", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.done.item():
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.done.fill_(True)
        return self.fc(x + self.shift)


class StartingByData(Starting):
    """The same, but that it has other tensors afterwards, and plain attributes."""

    def __init__(self):
        super().__init__()
        self.is_done, self.seen, self.table = False, [], {"sum": torch.zeros(WIDTH)}

    def forward(self, x):
        if not self.is_done:
            self.shift.data = -x.detach().mean(0)
            self.is_done = True
            self.cache = x.detach()
        self.seen.append(len(x))
        self.table["sum"] += x.detach().sum(0)
        self.table["last"] = x.detach()
        return self.fc(x + self.shift)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x + self.fc(x) / self.count


class Drawing(Counting):
    def forward(self, x):
        return x + self.fc(x) * torch.rand(WIDTH, dtype=x.dtype)


class Writing(Counting):
    """Layer that writes into its input."""

    def forward(self, x):
        return self.fc(x.mul_(2)) if not torch.is_grad_enabled() else self.fc(x * 2)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def states(model):
    """Return all that modules hold, by name; tensors are copied."""
    return [{**vars(m), "seen": list(getattr(m, "seen", [])), **vars_of(m)} for m in model.modules()]


def vars_of(module):
    tables = {f"table.{key}": value.clone() for key, value in getattr(module, "table", {}).items()}
    return tables | {key: value.clone() for key, value in module.state_dict().items()}


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kind", [Starting, StartingByData, Counting, Drawing, Writing])
def test_a_split_leaves_the_model_as_it_is(kind):
    torch.manual_seed(0)
    model, x = Net(kind).double(), 100 + torch.randn(2, WIDTH, dtype=torch.float64)
    model.layers[1].eval()
    before, given, generator = states(model), x.clone(), torch.get_rng_state()
    weights = [id(parameter) for parameter in model.parameters()]
    blocks = split(model, example=x)
    for one, other in zip(before, states(model), strict=True):
        assert one.keys() == other.keys()
        assert all(same(value, other[name]) for name, value in one.items() if not isinstance(value, dict))
    assert [id(parameter) for parameter in model.parameters()] == weights
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [block.training for block in blocks] == [True, False, True]
    assert not any(getattr(block, "is_done", False) or getattr(block, "seen", ()) for block in blocks)


def test_training_starts_from_what_the_model_has():
    torch.manual_seed(0)
    model, x = Net(Starting).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    expected = nn.functional.mse_loss(copy.deepcopy(model)(x), x).item()

    def work(transport):
        blocks = split(copy.deepcopy(model), example=100 + x)
        plan = qs.compile("1f1b", mesh="dp=1", microbatches=1)
        engine = Engine(plan, blocks, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), transport=transport)
        return engine.step(x, x).loss.item()

    assert run_local(1, work) == [pytest.approx(expected, abs=1e-12)]
