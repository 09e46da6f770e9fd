"""Snapshots detect and restore a changed value in any kind of holder, without running user code for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch

from quintsched.runtime.parallel.cut_proofs.block_kinds import content_of
from quintsched.runtime.user_objects.snapshot import Snapshot

RATE = 0.5
VARIABLE = ContextVar("variable", default=1)


class Private:
    __slots__ = ("__rate",)

    def __init__(self, rate: float = 1.0) -> None:
        self.__rate = rate

    def change(self) -> None:
        self.__rate += 1

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_Private__rate") and value == 1.0:
            raise AssertionError("called to put back")
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Frozen:
    rate: float = 1.0

    def change(self) -> None:
        object.__setattr__(self, "rate", 2.0)


class OfClass:
    rate = 1.0

    def change(self) -> None:
        type(self).rate, type(self).other = 2.0, 3.0  # type: ignore[attr-defined]


class Cached:
    @cached_property
    def rate(self) -> float:
        return RATE

    def change(self) -> None:
        global RATE
        RATE += 1


def bound_late() -> Callable[..., object]:
    if not RATE:
        later = 1

    def change() -> object:
        nonlocal later
        later = 2
        return later

    return change


CHANGES: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "private slot": (Private(), Private.change, "it._Private__rate"),
    "frozen": (Frozen(), Frozen.change, "it.rate"),
    "class": (OfClass(), OfClass.change, "OfClass.rate"),
    "property that is kept": (Cached(), Cached.change, "RATE"),
    "cell that was not bound": (bound_late(), lambda change: change(), "it, later"),
    "list in a partial": (partial(print, [1]), lambda it: it.args[0].append(2), "it[1][1]"),
    "deque": (deque([1, 2]), lambda it: it.popleft(), "it[0]"),
    "set": ({1}, lambda it: it.add(2), "it[2]"),
    "key of no name": ({(1, 2): 3}, lambda it: it.clear(), "it[…]"),
}


@pytest.mark.parametrize("place", CHANGES)
def test_what_has_changed_is_named_and_put_back(place: str) -> None:
    root, change, name = CHANGES[place]
    before = Snapshot({"it": root})
    assert not list(before.changes())
    change(root)
    assert next(before.changes()).name == name
    before.put_back()
    assert not list(before.changes())


def test_a_context_variable_is_its_default_again() -> None:
    before = Snapshot({"it": VARIABLE})
    VARIABLE.set(2)
    assert [change.name for change in before.changes()] == ["it"]
    before.put_back()
    assert VARIABLE.get() == 1


def test_a_trial_leaves_graphs_as_they_were() -> None:
    weight = torch.ones(2, requires_grad=True)
    buffer, made_of_it = torch.zeros(2), weight * 2
    before = Snapshot({"buffer": buffer, "made of it": made_of_it})
    buffer.add_(weight)
    made_of_it.add_(weight.detach())
    before.put_back()
    assert not buffer.requires_grad
    assert buffer.tolist() == [0, 0]
    assert made_of_it.grad_fn is not None
    assert made_of_it.tolist() == [2, 2]


def test_private_slots_tell_kinds_apart() -> None:
    blocks: list[Any] = [Private(1.0), Private(1.0), Private(2.0)]
    one, same, other = map(content_of, blocks)
    assert one == same != other
