"""Each collective against the one-process formula for what it and its backward mean."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.runtime.comm import Group, LocalTransport, LocalWorld, Transport, run_local
from quintsched.runtime.comm import autograd_collectives as collectives

Formula = Callable[[list[Tensor], int], list[Tensor]]


def identity(xs: list[Tensor], dim: int) -> list[Tensor]:
    return xs


def total(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [sum(xs[1:], xs[0])] * len(xs)


def joined(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(xs, dim)] * len(xs)


def own_slice(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [x.chunk(len(xs), dim)[i] for i, x in enumerate(xs)]


def slice_of_sum(xs: list[Tensor], dim: int) -> list[Tensor]:
    return own_slice(total(xs, dim), dim)


def swapped(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat([x.chunk(len(xs), dim)[i] for x in xs], dim) for i in range(len(xs))]


# name: (forward formula, backward formula, whether it takes a dimension)
TABLE: dict[str, tuple[Formula, Formula, bool]] = {
    "copy_to_group": (identity, total, False),
    "reduce_from_group": (total, identity, False),
    "gather_from_group": (joined, own_slice, True),
    "scatter_to_group": (own_slice, joined, True),
    "all_gather": (joined, slice_of_sum, True),
    "reduce_scatter": (slice_of_sum, joined, True),
    "all_to_all": (swapped, swapped, True),
}


def call(name: str, x: Tensor, group: Group, dim: int) -> Tensor:
    function = getattr(collectives, name)
    result: Tensor = function(x, group, dim) if TABLE[name][2] else function(x, group)
    return result


@pytest.mark.parametrize("name", TABLE)
@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(1, 4),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    dim=st.integers(-3, 2),
    seed=st.integers(0, 99),
)
def test_forward_and_backward_equal_the_formula(name: str, size: int, widths: list[int], dim: int, seed: int) -> None:
    dim = dim % len(widths)
    shape = [w * size if i == dim else w for i, w in enumerate(widths)]
    generator = torch.Generator().manual_seed(seed)
    forward, backward, _ = TABLE[name]
    xs = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(size)]
    expected = forward(xs, dim)
    grads = [torch.randn(y.shape, dtype=torch.float64, generator=generator) for y in expected]

    def body(t: Transport) -> tuple[Tensor, Tensor]:
        group = t.make_group([tuple(range(size))])
        x = xs[t.rank].clone().requires_grad_()
        y = call(name, x, group, dim - len(widths) if seed % 2 else dim)
        (grad,) = torch.autograd.grad(y, x, grads[t.rank].mT.contiguous().mT if len(widths) > 1 else grads[t.rank])
        assert torch.equal(x.detach(), xs[t.rank])
        return y.detach(), grad

    results = run_local(size, body)
    for (y, grad), wanted, wanted_grad in zip(results, expected, backward(grads, dim), strict=True):
        torch.testing.assert_close(y, wanted, rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, wanted_grad, rtol=0, atol=1e-14)


def test_rows_that_are_swapped_bring_their_gradients_back() -> None:
    """Member 0 has three rows for member 1, which has two for it; each keeps one."""
    sent = {0: [1, 3], 1: [2, 1]}

    def body(t: Transport) -> tuple[list[float], list[float]]:
        received = [sent[0][t.rank], sent[1][t.rank]]
        x = (torch.arange(sum(sent[t.rank]), dtype=torch.float64) + 10 * t.rank).unsqueeze(-1).requires_grad_()
        y = collectives.all_to_all_rows(x, t.make_group([(0, 1)]), sent[t.rank], received)
        grad = y.detach() * 2
        (back,) = torch.autograd.grad(y, x, grad)
        return y.flatten().tolist(), back.flatten().tolist()

    (first, first_back), (second, second_back) = run_local(2, body)
    assert first == [0, 10, 11]
    assert second == [1, 2, 3, 12]
    assert first_back == [0, 2, 4, 6]
    assert second_back == [20, 22, 24]


@pytest.mark.parametrize("name", TABLE)
def test_second_derivatives_pass(name: str) -> None:
    """The function is linear, so the derivative of its backward by the gradient is the function itself."""
    xs = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def body(t: Transport) -> None:
        group = t.make_group([(0, 1)])
        x = xs[t.rank].clone().requires_grad_()
        y = call(name, x, group, 0)
        grad = torch.ones_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, x, grad, create_graph=True)
        (again,) = torch.autograd.grad(back, grad, xs[t.rank])
        torch.testing.assert_close(again, y.detach(), rtol=0, atol=1e-14)

    run_local(2, body)


@pytest.mark.parametrize("name", TABLE)
def test_meta_tensors_only_get_shapes(name: str) -> None:
    group = LocalTransport(LocalWorld(2, timeout_s=0.01), 0).make_group([(0, 1)])
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    y = call(name, x, group, 1)
    expected = TABLE[name][0]([torch.empty(4, 6), torch.empty(4, 6)], 1)[0]
    assert y.is_meta
    assert y.shape == expected.shape
    y.backward(torch.empty_like(y))
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", ["scatter_to_group", "reduce_scatter", "all_to_all"])
def test_sizes_that_do_not_divide_are_refused(name: str) -> None:
    group = LocalTransport(LocalWorld(2), 0).make_group([(0, 1)])
    with pytest.raises(MisfitError, match=r"cannot cut dimension 1 of \(2, 3\) into 2 equal slices"):
        call(name, torch.zeros(2, 3), group, 1)
