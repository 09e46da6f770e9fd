"""Blocks that hold layers or weights beside their modules are kept whole; what cannot be followed parts a pair."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime.parallel.cut_proofs.block_twins import require_held_once

from .odd_blocks import HIDDEN, Mlp
from .training import require_equal, train


class Listed(Mlp):
    def has(self):
        return {"held": [{"w": self.fc1.weight}]}

    def between(self, y):
        return torch.tanh(y) * self.held[0]["w"].detach().norm()


class Closed(Mlp):
    def has(self):
        return {"run": lambda x: self.fc2(torch.softmax(self.fc1(x), -1))}

    def forward(self, x):
        return x + self.run(x)


class Partial(Mlp):
    def has(self):
        return {"rows": partial(F.linear, weight=self.fc2.weight)}

    def forward(self, x):
        return x + self.rows(torch.tanh(self.fc1(x)))


class Catching(Mlp):
    def between(self, y):
        try:
            return torch.linalg.cholesky(y[0].mT @ y[0] + torch.eye(HIDDEN))[:1] + y
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


@pytest.mark.parametrize("kind", [*BESIDE, Mlp, Catching, Wrapped, Functional])
def test_such_blocks_train_over_tp_as_one_process_does(kind, caplog):
    if kind in BESIDE:
        block = kind()
        with pytest.raises(MisfitError, match=r"^'(held|run|rows)' holds .* beside its modules$"):
            require_held_once(block, [block.fc1, block.fc2])
    (alone,) = train("pp=1", [kind], microbatches=1)
    require_equal(train("tp=2", [kind], microbatches=1), alone, 1e-12)
    said = "kept whole over tp" if kind in BESIDE else "cut one by one over tp"
    assert (said in caplog.text) == (kind is not Mlp)
