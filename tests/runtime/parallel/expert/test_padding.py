"""Mixtures of experts that pad to their capacity: the numbers of those that do not, and no wait for the routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quintsched as qs
from quintsched.runtime import MoE, apply_expert_parallel
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.models.gpt import MoEGPTOptions
from quintsched.runtime.models.layers import Mlp

from ...toys import difference
from .mixtures import mixture

EXPERTS, WIDTH = 5, 6

ROUTINGS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 2, "balance": 0.3, "z": 0.1, "shared": True},
    {"top_k": 3, "renormalise": True, "balance": 0.2},
    {"top_k": 5, "z": 0.1},
]


def results_of(layer: Any, tokens: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return output, auxiliary loss, and the gradients of tokens and parameters."""
    given = tokens.clone().requires_grad_()
    output, auxiliary, *_ = layer(given)
    total = (output * torch.arange(output.numel()).view_as(output)).sum() + (0.0 if auxiliary is None else auxiliary)
    gradients = torch.autograd.grad(total, [given, *parameters], allow_unused=True, materialize_grads=True)
    return [output.detach(), torch.zeros(()) if auxiliary is None else auxiliary.detach(), *gradients]


def tokens_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize("factor", [0.01, 0.5, 1.25, 100.0])
@pytest.mark.parametrize("options", ROUTINGS, ids=str)
def test_padding_changes_no_number(options: dict[str, Any], factor: float, rows: int) -> None:
    plain, padded = (mixture(capacity_factor=factor, pad_to_capacity=pads, **options) for pads in (False, True))
    tokens = tokens_of(rows)
    expected, found = (results_of(layer, tokens, list(layer.parameters())) for layer in (plain, padded))
    for wanted, value in zip(expected, found, strict=True):
        assert difference(wanted, value) <= 1e-12 if value.numel() else wanted.shape == value.shape
    assert torch.equal(padded.expert_tokens, plain.expert_tokens)


class Direction(nn.Module):
    """Gives the direction of a row, which none has whose length is 0, and notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.given: Tensor = torch.empty(0)
        self.gradient: Tensor = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        self.given = rows.detach()
        output: Tensor = self.linear(rows) / (rows - 1).norm(dim=-1, keepdim=True) + rows.norm(dim=-1, keepdim=True)
        output.register_hook(self._note)
        return output

    def _note(self, gradient: Tensor) -> None:
        self.gradient = gradient


def test_what_fills_up_is_rows_of_the_rank_and_has_no_gradient() -> None:
    """Rows of zeros would have no derivative, rows of ones no direction, and memory that nobody wrote could be NaN."""
    torch.manual_seed(0)
    layer = MoE(WIDTH, EXPERTS, Direction, top_k=2, capacity_factor=2.0, pad_to_capacity=True).double()
    tokens = tokens_of(2).repeat(5, 1).requires_grad_()
    output, _ = layer(tokens)
    output.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.isfinite().all()
    counts = layer.expert_tokens.tolist()
    assert min(counts) == 0 < max(counts)
    for expert, count in zip(layer.experts.values(), counts, strict=True):
        assert len(expert.given) == 8  # ceil(2 · 10 · 2 / 5)
        assert all((row == tokens).all(-1).any() for row in expert.given)
        assert not expert.gradient[count:].any()
        if count:
            mine = expert.given[: min(count, 8)]
            assert all((row == mine).all(-1).any() for row in expert.given), "repeats are of the expert's own rows"
        assert all(parameter.grad.isfinite().all() for parameter in expert.parameters())
        assert count or not any(parameter.grad.any() for parameter in expert.parameters())


@pytest.mark.parametrize(("factor", "rows"), [(0.01, 1), (1.0, 4), (1.25, 5), (2.4, 10), (2.5, 10), (100.0, 10)])
def test_an_expert_is_given_as_many_rows_as_it_may_take_and_no_more_than_tokens(factor: float, rows: int) -> None:
    layer = MoE(WIDTH, EXPERTS, Direction, top_k=2, capacity_factor=factor, pad_to_capacity=True).double()
    layer(tokens_of(10))
    assert [len(expert.given) for expert in layer.experts.values()] == [rows] * EXPERTS


# No wait.


READS = {"tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu", "nonzero", "unique"}
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "repeat_interleave.Tensor")


class NoReads(TorchFunctionMode):
    """Raises for a call of torch that hands numbers to Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in READS, f"{func.__name__} makes a device's host wait"
        return func(*args, **(kwargs or {}))


class NoWaits(TorchDispatchMode):
    """Raises for an operation, of a backward too, whose shape is known only when the device has computed it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in WAITS), f"{func} makes a device's host wait"
        indices = [index for given in args if isinstance(given, list | tuple) for index in given]
        masks = [index for index in indices if isinstance(index, Tensor) and index.dtype is torch.bool]
        assert "aten.index" not in str(func) or not masks, f"{func} by a mask makes a device's host wait"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[None]:
    with NoReads(), NoWaits():
        yield


def narrow() -> nn.Module:
    return Mlp(WIDTH, 7, bias=False)


@pytest.mark.parametrize("factor", [0.5, 2.5, 100.0])
def test_nothing_is_read(factor: float) -> None:
    """Tensors without data: what wants to know a number, or a shape that follows from numbers, raises."""
    options = {"capacity_factor": factor, "pad_to_capacity": True}
    with FakeTensorMode():
        layer = MoE(WIDTH, EXPERTS, narrow, renormalise=True, balance=0.1, z=0.1, shared=narrow(), **options)
        tokens = torch.randn(3, 4, WIDTH, requires_grad=True)
        output, auxiliary = layer(tokens)
        (output.sum() + auxiliary).backward()
        assert output.shape == tokens.shape
        assert all(parameter.grad is not None for parameter in [tokens, *layer.parameters()])


def test_without_padding_the_counts_are_read() -> None:
    for watching, words in (FakeTensorMode(), "item|_local_scalar_dense"), (no_waits(), "tolist makes a device's host"):
        with watching, pytest.raises((DataDependentOutputException, AssertionError), match=words):
            MoE(WIDTH, EXPERTS, narrow, capacity_factor=1.0)(torch.randn(4, WIDTH))


@pytest.mark.parametrize(("tokens_alike", "calls"), [(True, ["rows"] * 4), (False, ["counts", *["rows"] * 4])])
def test_ranks_swap_as_many_rows_and_no_counts(tokens_alike: bool, calls: list[str]) -> None:
    """Exchange rows there and back, forward and backward; counts are read only unless tokens are known to be equal."""

    def run(transport: Transport) -> tuple[list[str], bool]:
        group, found = transport.make_group([(0, 1)]), list[str]()
        plain = group.all_to_all

        def noting(output: Tensor, tensor: Tensor, *splits: list[int]) -> Any:
            found.append("counts" if tensor.dtype is torch.int64 else "rows")
            if tokens_alike:
                assert splits == ([8, 8], [8, 8])  # two experts a rank, ceil(1.25 · 6 · 2 / 4) of each
            return plain(output, tensor, *splits)

        group.all_to_all = noting  # type: ignore[method-assign]
        torch.manual_seed(0)
        layer = MoE(WIDTH, 4, narrow, capacity_factor=1.25, pad_to_capacity=True, balance=0.1)
        assert not layer.waits_for_routing
        apply_expert_parallel(layer, group, tokens_alike=tokens_alike)
        tokens = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(transport.rank), requires_grad=True)

        def both() -> None:
            output, auxiliary = layer(tokens)
            (output.square().sum() + auxiliary).backward()

        if tokens_alike:
            with no_waits():
                both()
        else:
            both()
        return found, layer.waits_for_routing

    assert run_local(2, run, rules="nccl") == [(calls, not tokens_alike)] * 2


def test_padding_wants_a_capacity_and_no_norms_over_rows() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    with pytest.raises(qs.UsageError, match=r"pad_to_capacity wants a capacity_factor.*capacity_factor=2.5, experts /"):
        mixture(top_k=2, pad_to_capacity=True)
    with pytest.raises(qs.UsageError, match=r"moe-gpt: pad_to_capacity wants a capacity_factor.*capacity_factor=4,"):
        MoEGPTOptions(experts=8, top_k=2, pad_to_capacity=True)
    MoE(WIDTH, 4, normed, capacity_factor=1.0)
    with pytest.raises(qs.UsageError, match="experts with batch norms cannot pad"):
        MoE(WIDTH, 4, normed, capacity_factor=1.0, pad_to_capacity=True)


@pytest.mark.parametrize(("factor", "pads", "fraction"), [(1.0, False, 0.4), (1.5, True, 0.6), (9.0, True, 1.0)])
def test_rows_that_fill_up_cost_as_much(factor: float, pads: bool, fraction: float) -> None:
    layer = mixture(top_k=2, capacity_factor=factor, pad_to_capacity=pads)
    assert layer.waits_for_routing != pads
    assert [share for _, share in layer.touched_parameters()] == pytest.approx([fraction] * 10)
