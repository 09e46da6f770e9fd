"""Ranks of one replica that are given different data are told so, all of them, before anything is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.stage.batches.same_batch_every_step import DataMarks
from quintsched.runtime.stage.batches.tree_digests import (
    _ODD,
    _digest,
    _joined_on_device,
    digest,
    digest_on_device,
    top_bits,
)

from ..trials import on_ranks

Given = tuple[Any, Any, dict[str, Any]]
Give = Callable[[Engine, int, Given], Given]


class Scaled(nn.Linear):
    """A layer that takes its inputs in a dict, and may be given a mask and a gain."""

    def forward(self, x: Any, mask: Tensor | None = None, gain: float = 1.0) -> Tensor:
        if isinstance(x, dict):
            x = x["x"] * x["scale"]
        return super().forward(x) * gain * (1.0 if mask is None else mask.unsqueeze(-1))


def run_steps(mesh: str, give: Give, steps: int = 1, parts: int = 1) -> list[str]:
    """Return what each rank is told, "" where it runs; what is refused changes no weight."""

    def run(engine: Engine) -> str:
        random = torch.Generator().manual_seed(engine.replica)
        for step in range(steps):
            x, y = torch.randn(2, 4, 4, generator=random)
            mask = (torch.rand(4, generator=random) > 0.5).float()
            inputs, targets, extras = give(engine, step, ({"x": x, "scale": 1.0}, y, {"mask": mask}))
            weights = [weight for stage in engine.stages.values() for weight in stage.parameters()]
            before = [weight.detach().clone() for weight in weights]
            try:
                for part in range(parts):
                    engine.step(inputs, targets, last=part == parts - 1, **extras)
                engine.evaluate(inputs, targets, **extras)
            except qs.MisfitError as error:
                assert all(map(torch.equal, before, weights))
                return str(error)
        return ""

    return on_ranks(run, [lambda: Scaled(4, 4)] * 2, mesh=mesh)


CHANGES: dict[str, tuple[str, Callable[[Given], Given]]] = {
    "inputs": ("inputs", lambda g: ({**g[0], "x": g[0]["x"] + 1e-6}, *g[1:])),
    "targets": ("targets", lambda g: (g[0], g[1].flip(0), g[2])),
    "an extra": ("'mask'", lambda g: (*g[:2], {"mask": 1 - g[2]["mask"]})),
    "None": ("'mask'", lambda g: (*g[:2], {"mask": None})),
    "another type": ("'mask'", lambda g: (*g[:2], {"mask": g[2]["mask"].bool()})),
    "one more extra": ("names of extras", lambda g: (*g[:2], {**g[2], "gain": 1.0})),
    "a plain value in a tree": ("inputs", lambda g: ({**g[0], "scale": 2.0}, *g[1:])),
}


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_of_tp_are_given_the_same(what: str) -> None:
    named, change = CHANGES[what]
    give: Give = lambda engine, _, given: change(given) if engine.transport.rank == 3 else given  # noqa: E731
    (said,) = set(run_steps("dp=2,tp=2", give))
    assert said.startswith(f"ranks 2 and 3 are given different {named}, and belong to one replica (1 of 2): give all")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("parts", [1, 2], ids=["at once", "accumulated"])
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "pp=2,tp=2", "dp=2,tp=2", "ep=2,pp=2"])
@pytest.mark.parametrize("what", CHANGES)
def test_ranks_that_drift_apart_later_are_told_before_weights_change(mesh: str, what: str, parts: int) -> None:
    last = qs.Mesh.parse(mesh).size - 1

    def give(engine: Engine, step: int, given: Given) -> Given:
        return CHANGES[what][1](given) if step == 5 and engine.transport.rank == last else given

    told = [said for said in run_steps(mesh, give, steps=6, parts=parts) if said]  # of this replica's ranks
    assert len(told) >= 2
    assert all("were not all given the same" in said and "in this step" in said for said in told)


def test_the_odd_one_of_several_is_named() -> None:
    def give(engine: Engine, step: int, given: Given) -> Given:
        return CHANGES["None"][1](given) if step >= 3 and engine.transport.rank == 2 else given

    (said,) = set(run_steps("pp=2,tp=2", give, steps=5))
    assert "rank 2 was given something else than ranks 0, 1 and 3: " in said
    assert "mask: None" in said.partition(", and not ")[0]
    assert "mask: float32" in said.partition(", and not ")[2]


def test_replicas_have_data_of_their_own_and_what_is_not_needed_may_be_anything() -> None:
    places: list[Callable[[Tensor], Any]] = [
        lambda x: x,
        lambda x: None,
        lambda x: torch.empty(3, device="meta"),
        torch.zeros_like,
        lambda x: x[:0],
        lambda x: {"x": x.to("meta"), "scale": 5.0},
    ]

    def give(engine: Engine, step: int, given: Given) -> Given:
        (inputs, targets, extras), place = given, places[step % len(places)]
        inputs = inputs if engine.needs_inputs or place is places[0] else place(inputs["x"])
        return inputs, targets if engine.needs_targets else place(targets), extras

    assert run_steps("dp=2,pp=2", give, steps=2 * len(places)) == [""] * 4


def test_many_replicas_take_turns() -> None:
    ranks, seen = 260, set()
    marks = [DataMarks(range(ranks), lambda rank: rank // 2, rank, torch.device("cpu")) for rank in range(ranks)]
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32, torch.complex64])
@pytest.mark.parametrize("count", [1, 7, 8, 1001])
def test_an_accelerator_finds_the_same_digest(dtype: torch.dtype, count: int) -> None:
    numbers = (torch.randn(count + 1, generator=torch.Generator().manual_seed(count)) * 100).to(dtype)[1:]
    assert int(digest_on_device(numbers)) % 2**64 == _digest(numbers)
    assert top_bits(digest_on_device(numbers), 20) == top_bits(_digest(numbers), 20)
    one = _joined_on_device(digest("words", []), digest_on_device(numbers))
    assert int(one) % 2**64 == digest("words", [numbers])
    two = _joined_on_device(one, digest_on_device(numbers))
    assert int(two) % 2**64 == digest("words", [numbers, numbers])
    assert int(_joined_on_device(two, 5)) % 2**64 == (digest("words", [numbers, numbers]) * _ODD + 5) % 2**64
