"""Blocks that hold layers or weights beside their modules are kept whole; what cannot be followed parts a pair."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime.comm import run_local
from quintsched.runtime.parallel.cut_proofs.block_twins import require_held_once

from .odd_mlps import HIDDEN, WIDTH, Mlp
from .training import BATCHES, require_equal, train_rank


class Listed(Mlp):
    def has(self):
        return {"held": [{"w": self.fc1.weight}]}

    def between(self, y):
        return torch.tanh(y) * self.held[0]["w"].detach().norm()


class Calling(Mlp):
    def forward(self, x):
        return x + self.run(x)


class Closed(Calling):
    def has(self):
        return {"run": lambda x: self.fc2(torch.softmax(self.fc1(x), -1))}


class Partial(Calling):
    def has(self):
        return {"rows": partial(F.linear, weight=self.fc2.weight)}

    def run(self, x):
        return self.rows(torch.tanh(self.fc1(x)))


class Catching(Mlp):
    shift = 1.0

    def between(self, y):
        try:
            return torch.linalg.cholesky(y[0].mT @ y[0] + self.shift * torch.eye(HIDDEN))[:1] + y
        except RuntimeError:
            return y - y.mean(-1, keepdim=True)


class Taking(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Mlp):
    def between(self, y):
        return torch.tanh(y.as_subclass(Taking)).as_subclass(torch.Tensor)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return 2 * h

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Functional(Mlp):
    def between(self, y):
        return Doubled.apply(y)


BESIDE = [Listed, Closed, Partial]


@pytest.mark.parametrize("kind", BESIDE)
def test_what_is_held_beside_modules_is_found(kind):
    block = kind()
    with pytest.raises(MisfitError, match=r"^'(held|run|rows)' holds .* beside its modules$"):
        require_held_once(block, [block.fc1, block.fc2])
    require_held_once(Mlp(), [])
    require_held_once(plain := Mlp(), [plain.fc1, plain.fc2])


@pytest.mark.parametrize("kind", [*BESIDE, Mlp, Catching, Wrapped, Functional])
def test_such_blocks_train_over_tp_as_one_process_does(kind, caplog):
    def blocks():
        torch.manual_seed(0)
        return [nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 2)]

    def run(transport, mesh):
        return train_rank(transport, mesh, built.pop(), [(x, y[..., :2]) for x, y in BATCHES], microbatches=1)

    built = [blocks() for _ in range(3)]
    (alone,) = run_local(1, lambda transport: run(transport, "pp=1"))
    require_equal(run_local(2, lambda transport: run(transport, "tp=2")), alone, 1e-12)
    said = "kept whole over tp" if kind in BESIDE else "cut one by one over tp"
    assert (said in caplog.text) == (kind is not Mlp)
