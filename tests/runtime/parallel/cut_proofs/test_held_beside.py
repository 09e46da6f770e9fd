"""Blocks that hold layers or weights beside their modules are kept whole; what cannot be followed parts a pair."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local
from quintsched.runtime.parallel.cut_proofs.reads.outside_references import require_held_once


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)
        self.prepare()

    def prepare(self):
        pass

    def between(self, h):
        return torch.tanh(h)

    def forward(self, x):
        return x + self.fc2(self.between(self.fc1(x)))


class Listed(Pair):
    def prepare(self):
        self.held = [{"w": self.fc1.weight}]

    def between(self, h):
        return torch.tanh(h) * self.held[0]["w"].detach().norm()


class Closed(Pair):
    def prepare(self):
        self.run = lambda x: self.fc2(torch.softmax(self.fc1(x), -1))

    def forward(self, x):
        return x + self.run(x)


class Partial(Pair):
    def prepare(self):
        self.run = partial(F.linear, weight=self.fc2.weight)

    def forward(self, x):
        return x + self.run(torch.tanh(self.fc1(x)))


class Catching(Pair):
    def between(self, h):
        try:
            return torch.linalg.cholesky(h[0].mT @ h[0] + self.shift * torch.eye(8))[:1] + h
        except RuntimeError:
            return h - h.mean(-1, keepdim=True)

    shift = 1.0


class Taking(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Pair):
    def between(self, h):
        return torch.tanh(h.as_subclass(Taking)).as_subclass(torch.Tensor)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return 2 * h

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Functional(Pair):
    def between(self, h):
        return Doubled.apply(h)


@pytest.mark.parametrize("kind", [Listed, Closed, Partial])
def test_what_is_held_beside_modules_is_found(kind):
    block = kind()
    with pytest.raises(MisfitError, match=r"^'(held|run)' holds .* beside its modules$"):
        require_held_once(block, [block.fc1, block.fc2])
    require_held_once(Pair(), [])
    require_held_once(plain := Pair(), [plain.fc1, plain.fc2])


@pytest.mark.parametrize("kind", [Pair, Listed, Closed, Partial, Catching, Wrapped, Functional])
def test_such_blocks_train_over_tp_as_one_process_does(kind, caplog):
    def blocks():
        torch.manual_seed(0)
        return [nn.Linear(3, 4).double(), kind().double(), nn.Linear(4, 2).double()]

    def trained(transport):
        plan = qs.compile("1f1b", mesh=f"tp={transport.world_size}", microbatches=1)
        sgd = partial(torch.optim.SGD, lr=0.1)
        engine = Engine(plan, built[transport.rank], F.mse_loss, sgd, transport=transport, dtype=torch.float64)
        x, y = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3), torch.ones(5, 2, dtype=torch.float64)
        return [engine.step(x * (step + 1), y).loss.item() for step in range(3)]

    built = [blocks(), blocks()]
    found = run_local(2, trained)
    built = [blocks()]
    assert found == [pytest.approx(run_local(1, trained)[0], rel=1e-12)] * 2
    said = "kept whole over tp" if kind in (Listed, Closed, Partial) else "cut one by one over tp"
    assert (said in caplog.text) == (kind is not Pair)
