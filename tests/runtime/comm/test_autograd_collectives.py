"""Differentiable collectives: the backward of a backward is the collective itself, as each is linear."""

import pytest
import torch
from torch import Tensor

from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.comm import autograd_collectives as collectives

ALONG = ("gather_from_group", "scatter_to_group", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives along a dimension of a tensor."""


@pytest.mark.parametrize("name", ["copy_to_group", "reduce_from_group", *ALONG])
def test_second_derivatives_pass(name: str) -> None:
    xs = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(transport: Transport) -> None:
        group, x = transport.make_group([(0, 1)]), xs[transport.rank].clone().requires_grad_()
        y: Tensor = getattr(collectives, name)(x, group, *([0] if name in ALONG else []))
        gradient = torch.ones_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        (again,) = torch.autograd.grad(back, gradient, xs[transport.rank])
        torch.testing.assert_close(again, y.detach(), rtol=0, atol=1e-14)

    run_local(2, run)
