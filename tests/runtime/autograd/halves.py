"""Backwards in two halves, and the plain ones that they have to equal bit for bit."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quintsched.runtime.autograd.deferred_weight_grads import Products, WeightQueue, defer_weights

Gradients = dict[str, Tensor | None]


def drain(products: Products) -> list[nn.Parameter]:
    """Add the gradients to the parameters; return these in order."""
    order: list[nn.Parameter] = []

    def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
        order.append(parameter)
        assert not gradient.requires_grad
        assert gradient.dtype == parameter.dtype
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)

    products.drain(accumulate)
    return order


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def seed_like(y: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(2)
    return torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype)


def backward_plainly(module: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None], Gradients]:
    outputs, inputs = [], [leaf(x) for x in batches]
    for x in inputs:
        outputs.append(module(x))
        torch.autograd.backward(outputs[-1], seed_like(outputs[-1]))
    return outputs, [x.grad for x in inputs], {n: p.grad for n, p in module.named_parameters()}


def backward_in_halves(module: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None], Gradients]:
    """All forwards, all input halves, then all weight halves, as a zero-bubble schedule may have it."""
    queue = WeightQueue()
    defer_weights(module, queue)
    inputs = [leaf(x) for x in batches]
    outputs = [module(x) for x in inputs]
    waiting = []
    for y in outputs:
        with queue.deferring() as products:
            torch.autograd.backward(y, seed_like(y))
        waiting.append(products)
    for products in waiting:
        drain(products)
    return outputs, [x.grad for x in inputs], {n: p.grad for n, p in module.named_parameters()}


def check_same_bits(module: nn.Module, *batches: Tensor, twin: nn.Module | None = None) -> None:
    twin = twin or copy.deepcopy(module)
    y, of_x, of_weights = backward_plainly(module, list(batches))
    halves = backward_in_halves(twin, list(batches))
    torch.testing.assert_close(halves, (y, of_x, of_weights), rtol=0, atol=0)
    twin.zero_grad()
    torch.testing.assert_close(backward_plainly(twin, list(batches)), (y, of_x, of_weights), rtol=0, atol=0)


class Mixed(nn.Module):
    """One of everything: layers that can wait, others that cannot, one used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)
        self.twice = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.functional = nn.Parameter(torch.randn(16, 16) / 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 12)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = self.twice(F.gelu(self.twice(self.norm(x))))
        x = self.frozen(x) + self.up(self.down(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(F.linear(x, self.functional))
