"""Generators are found wherever code of a user's reaches them; nothing of the user's is called to find them."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from quintsched.runtime.objects.reachable import _MOST, reachable

GLOBAL = np.random.default_rng(1)
OF_HELPER = random.Random(2)
MODULE = types.ModuleType("of_a_user")
MODULE.__dict__.update(inner=types.ModuleType("of_a_user.inner"), GLOBAL=None)
MODULE.inner.NOISE = np.random.RandomState(3)


class Rows(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index

    def __len__(self) -> int:
        return 4


class OfClass(Rows):
    generator = np.random.default_rng(4)


class Derived(OfClass):
    pass


class OfMethod(Rows):
    def __getitem__(self, index: int) -> Any:
        return index + GLOBAL.random()


def helper() -> float:
    return (lambda: OF_HELPER.random())()


class OfFunction(Rows):
    @staticmethod
    def noise() -> float:
        return helper()


class OfProperty(Rows):
    @property
    def noise(self) -> Any:
        return GLOBAL.random()


class OfModule(Rows):
    def __getitem__(self, index: int) -> Any:
        return index + MODULE.inner.NOISE.rand()


class Slots:
    __slots__ = ("__own", "nothing")

    def __init__(self) -> None:
        self.__own = np.random.default_rng(5)


class Transform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


class Short(list[Any]):
    pass


def with_default(generator: Any = GLOBAL) -> Any:
    return generator


def within(generator: Any) -> Callable[[], Any]:
    return lambda: generator


def given_once() -> Iterator[float]:
    while True:
        yield GLOBAL.random()


def holding(part: Any) -> Rows:
    rows = Rows()
    rows.part = part  # type: ignore[attr-defined]
    return rows


def generators_of(*holders: Any) -> list[Any]:
    kinds = torch.Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
    return [found for found in reachable(holders) if isinstance(found, kinds)]


own = np.random.default_rng(6)
transform = Transform()
PLACES: dict[str, tuple[Callable[[], Any], Any]] = {
    "class": (OfClass, OfClass.generator),
    "class that another is derived from": (Derived, OfClass.generator),
    "subsets": (lambda: Subset(ConcatDataset([Derived(), Rows()]), [0]), OfClass.generator),
    "global": (OfMethod, GLOBAL),
    "global of a function": (OfFunction, OF_HELPER),
    "global of a property": (OfProperty, GLOBAL),
    "another module": (OfModule, MODULE.inner.NOISE),
    "slots": (lambda: holding(part := Slots()) and holding(part), None),
    "transform": (lambda: holding(transform), transform.generator),
    "transforms": (lambda: holding(nn.Sequential(*[nn.Identity() for _ in range(99)], transform)), transform.generator),
    "default": (lambda: holding(with_default), GLOBAL),
    "partial": (lambda: holding(functools.partial(print, own)), own),
    "closure": (lambda: holding(within(own)), own),
    "wrapper": (lambda: holding(functools.cache(with_default)), GLOBAL),
    "bound method": (lambda: holding(OF_HELPER.random), OF_HELPER),
    "method bound by hand": (lambda: holding(types.MethodType(with_default, "self")), GLOBAL),
    "bits": (lambda: holding(own.bit_generator), own.bit_generator),
    "entry of a list of an own kind": (lambda: holding(Short([own])), own),
    "what is given once": (lambda: holding(given_once()), GLOBAL),
}


@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_a_user", MODULE)
    make, expected = PLACES[place]
    found = generators_of(DataLoader(make(), batch_size=2))
    assert len(found) == 1
    assert expected is None or found[0] is expected


def test_nothing_of_the_users_is_called() -> None:
    class Touchy(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def __iter__(self) -> Any:
            raise AssertionError

        __len__ = values = items = __eq__ = __bool__ = __iter__  # type: ignore[assignment]

        @property
        def part(self) -> Any:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

    touchy = Touchy()
    dict.__setitem__(touchy, "own", own)
    assert generators_of([touchy]) == [own]


def test_data_are_not_searched() -> None:
    read = [own, *[0] * 10**6]
    assert len(list(reachable([holding(read)]))) < 20
    assert generators_of([holding(read)]) == []
    deep: Any = own
    for _ in range(30):
        deep = [deep]
    assert generators_of([deep]) == []
    wide = [[holding({}) for _ in range(60)] for _ in range(60)]
    assert len(list(reachable([wide]))) == _MOST
