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
from quintsched.runtime.stage.batches.compare_whole_batches import SameData
from quintsched.runtime.stage.batches.same_batch_every_step import DataMarks

from ..toys import sgd

CPU = torch.device("cpu")
Given = tuple[Tensor, Tensor, dict[str, Any]]


class Shifted(nn.Linear):
    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) + shift * scale


def refusals(mesh: str, give: Callable[[Engine, Transport, Given], Given], steps: int = 1) -> set[str]:
    """Return the refusals of the ranks; "" for those that run."""
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


def test_replicas_have_data_of_their_own_and_nobody_gives_what_is_not_needed() -> None:
    def give(engine: Engine, transport: Transport, given: Given) -> Given:
        x, y, extras = given
        in_place = torch.full_like(x, transport.rank)
        return x if engine.needs_inputs else in_place, y if engine.needs_targets else None, extras

    assert refusals("dp=2,pp=2", give, steps=3) == {""}


def weights_of(engine: Engine) -> Tensor:
    modules = engine._model.stages.values()
    return torch.cat([weight.detach().flatten() for module in modules for weight in module.parameters()])


LATE = ["tp=2", "pp=2", "pp=2,tp=2", "dp=2,tp=2", "ep=2,pp=2"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("last", [True, False], ids=["at once", "accumulated"])
@pytest.mark.parametrize("mesh", LATE)
@pytest.mark.parametrize("what", ["inputs", "targets", "extras"])
def test_ranks_that_drift_apart_later_are_told_before_weights_change(mesh: str, what: str, last: bool) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    change = CHANGES["'shift'" if what == "extras" else what]

    unchanged = []

    def run(transport: Transport) -> None:
        engine = Engine(plan, [lambda: Shifted(4, 4)] * 2, nn.functional.mse_loss, sgd, transport=transport)
        random = torch.Generator().manual_seed(engine.replica)
        for step in range(6):
            x, y, shift = torch.randn(3, 4, 4, generator=random)
            mine: Given = (x, y, {"shift": shift})
            before = weights_of(engine)
            for part in range(2):
                odd = step == 5 and part == 0 and transport.rank == plan.mesh.size - 1
                inputs, targets, extras = change(mine) if odd else mine
                try:
                    engine.step(inputs, targets, last=last or part == 1, **extras)
                except qs.MisfitError:
                    unchanged.append(step == 5 and torch.equal(before, weights_of(engine)))
                    raise

    with pytest.raises(qs.MisfitError, match=f"were not all given the same {what} in this step"):
        run_local(plan.mesh.size, run, timeout_s=60)
    assert unchanged
    assert all(unchanged)


def test_whole_data_are_compared_in_steps_ever_farther_apart() -> None:
    def due(transport: Transport) -> list[int]:
        same = SameData(0, 1, transport.world_group())
        return [step for step in range(20) if same.is_due("train")]

    assert run_local(2, due) == [[0, 1, 2, 4, 8, 16]] * 2


def test_many_replicas_take_turns() -> None:
    ranks, seen = 260, set()
    marks = [DataMarks(range(ranks), lambda rank: rank // 2, rank, CPU) for rank in range(ranks)]
    for _ in range(3):
        for rank, mark in enumerate(marks):
            x = torch.arange(8.0) + (rank == 77)
            mark.note({"inputs": x, "targets": None}, {"inputs": True, "targets": False}, {})
        sums = [float(sum(column)) for column in zip(*(mark.take_row() for mark in marks), strict=True)]
        try:
            marks[0].require_equal(sums)
        except qs.MisfitError as error:
            seen.add(str(error)[:16])
    assert seen == {"ranks 76 and 77 "}
