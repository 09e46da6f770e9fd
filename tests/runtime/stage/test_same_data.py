"""Ranks of one replica that are given different data are told so, all of them, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.stage.same_data import fingerprint

from ..toys import sgd

Given = tuple[Tensor, Tensor, dict[str, Any]]


class Shifted(nn.Linear):
    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) + shift * scale


def refusals(mesh: str, give: Callable[[Engine, Transport, Given], Given], steps: int = 1) -> set[str]:
    """What the ranks say; "" where they run."""
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def run(transport: Transport) -> str:
        engine = Engine(plan, [lambda: Shifted(4, 4)] * 2, nn.functional.mse_loss, sgd, transport=transport)
        random = torch.Generator().manual_seed(engine.replica)
        x, y, shift = torch.randn(3, 4, 4, generator=random)
        try:
            for _ in range(steps):
                inputs, targets, extras = give(engine, transport, (x, y, {"shift": shift}))
                engine.step(inputs, targets, **extras)
                engine.evaluate(inputs, targets, **extras)
        except qs.MisfitError as error:
            return str(error)
        return ""

    return set(run_local(plan.mesh.size, run, timeout_s=60))


CHANGES: dict[str, Callable[[Given], Given]] = {
    "inputs": lambda g: (g[0] + 1e-6, *g[1:]),
    "targets": lambda g: (g[0], g[1].flip(0), g[2]),
    "'shift'": lambda g: (*g[:2], {"shift": g[2]["shift"] * 2}),
    "'scale'": lambda g: (*g[:2], {**g[2], "scale": 3.0}),
    "names of extras": lambda g: (*g[:2], {**g[2], "scale": 1.0}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_of_tp_are_given_the_same(what: str) -> None:
    def give(engine: Engine, transport: Transport, given: Given) -> Given:
        if what == "'scale'":
            given = (*given[:2], {**given[2], "scale": 2.0})
        return CHANGES[what](given) if transport.rank == 3 else given

    (said,) = refusals("dp=2,tp=2", give)
    assert said.startswith(f"ranks 2 and 3 are given different {what}, and belong to one replica (1 of 2): give all")


def test_stages_are_given_the_same_extras() -> None:
    def give(engine: Engine, transport: Transport, given: Given) -> Given:
        return CHANGES["'shift'"](given) if transport.rank else given

    (said,) = refusals("pp=2", give)
    assert said.startswith("ranks 0 and 1 are given different 'shift'")


def test_replicas_have_data_of_their_own_and_nobody_gives_what_is_not_needed() -> None:
    def give(engine: Engine, transport: Transport, given: Given) -> Given:
        x, y, extras = given
        return x if engine.needs_inputs else x + 1, y if engine.needs_targets else y + 1, extras

    assert refusals("dp=2,pp=2", give, steps=3) == {""}


def test_only_the_first_steps_are_compared() -> None:
    calls = []

    def give(engine: Engine, transport: Transport, given: Given) -> Given:
        calls.append(transport.rank)
        return (given[0] + transport.rank, *given[1:]) if len(calls) > 4 else given

    assert refusals("tp=2", give, steps=3) == {""}


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_a_fingerprint_is_of_all_numbers(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5).to(dtype)
    other = tensor.clone()
    other[2, 4] = 1
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t()) != fingerprint(other)
    assert fingerprint({"a": tensor}) == fingerprint({"a": tensor.clone()}) != fingerprint(tensor.view(5, 3))
    assert fingerprint(tensor[:0]) != fingerprint(tensor[:, :0])
