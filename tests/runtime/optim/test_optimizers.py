"""Optimizers of every kind give the numbers of one process, on replicas that shard and on cut matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.errors import QuintschedError
from quintsched.runtime.blocks.block_outlines import Blocks

from ..toys import Outcome, ids_task, tiny_gpt, train_on, train_plainly, worst_difference
from .optimizers import (
    Lookahead,
    Shampoo,
    SignMomentum,
    Trust,
    adafactor,
    by_dims,
    by_shape,
    muon,
    plain,
)

LENGTH, SAMPLES = 8, 8
slow = pytest.mark.slow

BUILDS: dict[str, Callable[..., Any]] = {
    "by dims": by_dims,
    "by shape": by_shape,
    "muon": muon,
    "adafactor": adafactor,
    "shampoo": Shampoo,
    "trust": Trust,
    "sign momentum": SignMomentum,
    "lookahead": lambda parameters: Lookahead(torch.optim.AdamW(parameters, lr=1e-3)),
}
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")


@cache
def alone(name: str) -> Outcome:
    build = BUILDS.get(name) or partial(getattr(torch.optim, name), lr=0.01)
    return train_plainly(ids_task(2, SAMPLES, LENGTH), blocks(), 4, plain(build), dtype=torch.float64)


def blocks() -> Blocks:
    return tiny_gpt(LENGTH, depth=2)


def require_equality(name: str, plan: qs.Plan, **more: Any) -> None:
    build = BUILDS.get(name) or partial(getattr(torch.optim, name), lr=0.01)
    task = ids_task(2, SAMPLES, LENGTH)
    found = train_on(plan, task, blocks(), build, dtype=torch.float64, bucket_mb=0.004, **more)
    assert worst_difference(found, alone(name)) <= 1e-9


MESHES = ("dp=2,pp=2", "dp=2,tp=2", "dp=2", "tp=2,pp=2")


def _cases() -> list[Any]:
    found = []
    for place, (name, mesh, zero) in enumerate(product(BUILDS, MESHES, (0, 1, 2, 3))):
        if zero == 0 or "dp" in mesh:
            daily = place % 11 == 0 or (zero == 1 and mesh == MESHES[0])
            found.append(pytest.param(name, mesh, zero, marks=() if daily else slow))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "mesh", "zero"), _cases())
def test_optimizers_equal_one_process(name: str, mesh: str, zero: int) -> None:
    if name == "lookahead" and ("tp" in mesh or "pp" in mesh):
        with pytest.raises(QuintschedError, match=r"Lookahead\.needs_whole_parameters"):
            require_equality(name, qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero))
        return
    require_equality(name, qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_own_equal_one_process_in_segments(name: str) -> None:
    require_equality(name, qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=1))
