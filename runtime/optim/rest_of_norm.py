"""The norm of all gradients, for an optimizer that clips by it and has some of the parameters.

    rank 0    [ p0 p1 ] + [ r ]        r has one number, whose gradient is √(norm² - |∂p0|² - |∂p1|²)
    rank 1    [ p2 ]    + [ r ]        so that the optimizer finds the norm over p0 p1 p2 on both

The engine knows the norm before it steps, so nobody sends anything for it. `r` is a parameter only within a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .remake import nested_in, parameters_of


@contextmanager
def rest_of_norm(optimizer: Optimizer, norm: Tensor) -> Iterator[None]:
    """A context in which the gradients of an optimizer's parameters, and of one more, have this 2-norm."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    squares = [torch.linalg.vector_norm(gradient).to(norm.dtype).square() for gradient in gradients]
    here = torch.stack(squares).sum() if squares else torch.zeros_like(norm)
    group = next(group for group in optimizer.param_groups if group["params"])
    like: nn.Parameter = group["params"][0]
    rest = nn.Parameter(like.new_zeros([1] * like.dim()))
    rest.grad = torch.full_like(rest, 1.0) * (norm.square() - here).clamp(min=0).sqrt().to(rest.real.dtype)
    group["params"].append(rest)
    try:
        yield
    finally:
        group["params"].pop()
        for one in (optimizer, *nested_in(optimizer)):
            one.state.pop(rest, None)
