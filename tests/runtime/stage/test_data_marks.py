"""Marks of what ranks are given: of structure, plain values and all numbers, in every step; who is odd is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.stage.batches.compare_whole_batches import fingerprint
from quintsched.runtime.stage.batches.same_batch_every_step import DataDigest, mark_of, who_is_odd
from quintsched.runtime.stage.batches.tree_digests import (
    _ODD,
    _digest,
    _joined_on_device,
    digest,
    digest_on_device,
    top_bits,
)

from ..toys import sgd

X = torch.arange(24.0).reshape(4, 6)

Extras = dict[str, Any]
Given = tuple[Any, Tensor, Extras]


class Scaled(nn.Linear):
    """A layer that takes its inputs in a dict, and may be given a mask and a gain."""

    def forward(self, x: Any, mask: Tensor | None = None, gain: float = 1.0) -> Tensor:
        if isinstance(x, dict):
            x = x["x"] * x["scale"]
        return super().forward(x) * gain * (1.0 if mask is None else mask.unsqueeze(-1))


def run_steps(mesh: str, give: Callable[[Engine, Transport, int, Given], Given], steps: int = 5) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def run(transport: Transport) -> None:
        engine = Engine(plan, [lambda: Scaled(4, 4)] * 2, nn.functional.mse_loss, sgd, transport=transport)
        random = torch.Generator().manual_seed(engine.replica)
        for step in range(steps):
            x, y = torch.randn(2, 4, 4, generator=random)
            mask = (torch.rand(4, generator=random) > 0.5).float()
            mine: Given = ({"x": x, "scale": 1.0}, y, {"mask": mask, "gain": 1.0})
            inputs, targets, extras = give(engine, transport, step, mine)
            engine.step(inputs, targets, **extras)

    run_local(plan.mesh.size, run, timeout_s=60)


CHANGES: dict[str, Callable[[Given], Given]] = {
    "None": lambda g: (*g[:2], {**g[2], "mask": None}),
    "an extra that is not there": lambda g: (*g[:2], {"gain": 1.0}),
    "a plain extra": lambda g: (*g[:2], {**g[2], "gain": 2.0}),
    "another dtype": lambda g: (*g[:2], {**g[2], "mask": g[2]["mask"].bool()}),
    "a plain value in a tree": lambda g: ({**g[0], "scale": 2.0}, *g[1:]),
}


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_is_no_tensor_is_compared_in_every_step(mesh: str, what: str) -> None:
    def give(engine: Engine, transport: Transport, step: int, given: Given) -> Given:
        return CHANGES[what](given) if step >= 3 and transport.rank == 1 else given

    with pytest.raises(qs.MisfitError, match=r"not all given the same (inputs|extras) in this step"):
        run_steps(mesh, give)


def test_the_odd_one_of_several_is_named() -> None:
    def give(engine: Engine, transport: Transport, step: int, given: Given) -> Given:
        return CHANGES["None"](given) if step >= 3 and transport.rank == 2 else given

    named = "rank 2 was given something else than ranks 0, 1 and 3: .*mask: None.*, and not .*mask: float32"
    with pytest.raises(qs.MisfitError, match=named):
        run_steps("pp=2,tp=2", give)


def test_what_is_not_needed_may_be_none_or_meta_or_all_one_in_any_step() -> None:
    places: list[Callable[[Tensor], Any]] = [
        lambda x: x,
        lambda x: None,
        lambda x: torch.empty(3, device="meta"),
        torch.zeros_like,
        lambda x: x[:0],
        lambda x: {"x": x.to("meta"), "scale": 5.0},
    ]

    def give(engine: Engine, transport: Transport, step: int, given: Given) -> Given:
        place = places[step % len(places)]
        inputs, targets, extras = given
        return (
            inputs if engine.needs_inputs else inputs if place(X) is X else place(inputs["x"]),
            targets if engine.needs_targets else place(targets),
            extras,
        )

    run_steps("pp=2", give, steps=2 * len(places))


def test_a_meta_tensor_is_refused_where_it_is_needed() -> None:
    def give(engine: Engine, transport: Transport, step: int, given: Given) -> Given:
        return given[0], given[1].to("meta"), given[2]

    with pytest.raises(qs.MisfitError, match="targets, which this rank needs, is a tensor on the meta device"):
        run_steps("pp=2", give)


def number_of(tree: Any, turn: int = 0) -> int:
    mark = mark_of(tree, is_needed=True, turn=turn)
    assert isinstance(mark, DataDigest)
    return int(mark.number)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64]
)
def test_a_mark_is_of_all_numbers_of_a_small_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros(30, 41).to(dtype)
    for place in [(0, 0), (7, 3), (29, 40)]:
        other = tensor.clone()
        other[place] = 1
        assert number_of(other) != number_of(tensor) == number_of(tensor.t().contiguous().t())


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


def test_rows_that_change_places_change_the_mark() -> None:
    found = [number_of(nn.functional.one_hot(ids, 1000).float()) for ids in torch.randint(1000, (200, 8))]
    assert len(set(found)) > 195


@pytest.mark.parametrize("columns", [20_000, 200_000])
def test_other_rows_of_a_large_sparse_tensor_are_found_soon(columns: int) -> None:
    ids = torch.randint(columns, (2, 16), generator=torch.Generator().manual_seed(1))
    one, other = (nn.functional.one_hot(of, columns).float() for of in ids)
    assert any(number_of(one, turn) != number_of(other, turn) for turn in range(16))
    assert all(number_of(one, turn) == number_of(one.t().contiguous().t(), turn) for turn in range(3))


def test_plain_values_say_the_same_in_every_process() -> None:
    same = [({"d": torch.device("cpu"), "s": frozenset("ab")}, {"d": torch.device("meta"), "s": frozenset("ba")})]
    same += [((object(), X), (object(), X)), ([X.requires_grad_(True)], [X.detach()])]
    for one, other in same:
        assert number_of(one) == number_of(other)
        assert fingerprint(one) == fingerprint(other)
    for one, other in [((X, 1), (X, 1.0)), ((X, None), (X,)), ({"a": X}, {"b": X}), (X, X.view(6, 4)), ([], ())]:
        assert number_of(one) != number_of(other)
        assert fingerprint(one) != fingerprint(other)


def test_it_is_said_who_is_odd_only_where_most_are_alike() -> None:
    assert who_is_odd({0: (1, "a"), 1: (1, "a")}) == ""
    assert who_is_odd({0: (1, "a"), 1: (2, "a")}) == " (nobody can be told from the other)"
    assert who_is_odd({0: (1, "a"), 1: (2, "b")}).endswith("other; rank 0 was given a; rank 1 was given b)")
    assert (
        who_is_odd({0: (1, "a"), 1: (2, "a"), 5: (1, "a")}) == " (rank 1 was given something else than ranks 0 and 5)"
    )
    assert who_is_odd({0: (1, "a"), 1: (2, "a"), 2: (3, "a"), 3: (1, "a")}).startswith(" (nobody can be told")
