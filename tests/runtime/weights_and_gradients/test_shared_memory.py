"""Tensors in the memory of trained weights: as in one process, or refused where the plan would separate them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import split
from quintsched.runtime.guards.state_in_several_stages import SharedState

from ...helpers.training import check_equality, random_batch, sgd, train_ranks

linear = partial(nn.Linear, 4, 4, dtype=torch.float64)
BATCHES = [random_batch(seed, 8, 4) for seed in (0, 1)]


class Aliased(nn.Module):
    """Two layers, and a tensor that may alias the weight of the first."""

    def __init__(self, alias: Callable[[Any], object]) -> None:
        super().__init__()
        self.enc, self.dec, self.seen = linear(), linear(), None
        alias(self)

    def forward(self, x: Tensor) -> Tensor:
        made = self.dec(self.enc(x).relu())
        return made if self.seen is None else made + F.linear(x, self.seen)


def columns(module: Any) -> Tensor:
    whole = torch.randn(4, 8, dtype=torch.float64) / 4
    module.enc.weight, module.dec.weight = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])
    return whole


def see(module: Any, seen: Tensor) -> None:
    del module.seen
    module.seen = seen


def buffer(module: Any) -> None:
    del module.seen
    module.register_buffer("seen", module.enc.weight.detach(), persistent=False)


TIES: Mapping[str, Callable[[Any], object]] = {
    "data of another": lambda m: setattr(m.dec.weight, "data", m.enc.weight.data),
    "a parameter made of it": lambda m: setattr(m.dec, "weight", nn.Parameter(m.enc.weight.data)),
}
VIEWS: Mapping[str, Callable[[Any], object]] = {
    "a buffer": buffer,
    "an attribute": lambda m: see(m, m.enc.weight.data.t()),
    "a frozen parameter": lambda m: see(m, nn.Parameter(m.enc.weight.detach(), requires_grad=False)),
    "the tensor that they are views of": lambda m: see(m, columns(m)[:, 2:6]),
}
SEPARATE: Mapping[str, Callable[[Any], object]] = {
    "columns of one tensor": columns,
    "one parameter": lambda m: setattr(m.dec, "weight", m.enc.weight),
}


def plan_of(zero: int, mesh: str = "dp=2", **more: Any) -> qs.Plan:
    return qs.compile(more.pop("schedule", "1f1b"), mesh=mesh, microbatches=2, zero=zero, **more)


def row(alias: Callable[[Any], object]) -> list[Any]:
    return [linear, partial(Aliased, alias), linear]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*TIES, *VIEWS])
def test_what_shares_memory_follows_without_zero_and_is_refused_with_it(name: str) -> None:
    blocks, line = row({**TIES, **VIEWS}[name]), r"dec\.weight = enc\.weight" if name in TIES else "read enc.weight"
    check_equality(plan_of(0), blocks, F.mse_loss, sgd, BATCHES)
    with pytest.raises(qs.MisfitError, match=rf"block 1 \(Aliased\).*'enc\.weight', and ZeRO-1 moves .*{line}"):
        train_ranks(plan_of(1, "dp=2,pp=2"), blocks, F.mse_loss, sgd, BATCHES)


@pytest.mark.parametrize("name", SEPARATE)
def test_what_shares_no_element_or_is_one_parameter_is_trained_with_zero(name: str) -> None:
    check_equality(plan_of(3), row(SEPARATE[name]), F.mse_loss, sgd, BATCHES)


def tied_by_data() -> nn.Sequential:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[2].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize(("cuts", "separates"), [((3,), ""), ((3,), "ZeRO-1 moves"), ((1, 3), "")])
def test_across_blocks_they_are_refused_unless_they_are_tied(cuts: tuple[int, ...], separates: str) -> None:
    blocks, stages = split(tied_by_data()), [range(*ends) for ends in zip((0, *cuts), cuts, strict=False)]
    shared = partial(SharedState, blocks, stages, separates=separates)
    shared(tied={"w": ("0.weight", "2.weight")})
    if not separates and len(cuts) == 1:
        shared()
        return
    with pytest.raises(qs.MisfitError, match=r"'2\.weight' is another tensor in the memory of .*tie them, tied=\{'w'"):
        shared()


def with_one_memory(model: Any) -> list[nn.Module]:
    model[3].weight.data = model[0].weight.data
    return [*model]


def test_tied_weights_of_one_memory_on_two_stages_of_a_rank_are_stepped_once() -> None:
    plan = plan_of(0, "pp=2", schedule="dualpipe-v", tied={"w": (0, 3)}, stages=[1, 1, 1, 1])
    model, ties = nn.Sequential(*(linear() for _ in range(4))), {"w": ("0.weight", "3.weight")}
    check_equality(plan, model, F.mse_loss, sgd, BATCHES, tied=ties, cut=with_one_memory)
