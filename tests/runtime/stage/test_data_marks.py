"""Marks of what ranks are given: of structure, plain values and all numbers, the same on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quintsched.runtime.stage.batches.compare_whole_batches import fingerprint
from quintsched.runtime.stage.batches.same_batch_every_step import DataDigest, mark_of
from quintsched.runtime.stage.batches.tree_digests import (
    _ODD,
    _digest,
    _joined_on_device,
    digest,
    digest_on_device,
    top_bits,
)

X = torch.arange(24.0).reshape(4, 6)


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


def test_plain_values_say_the_same_in_every_process() -> None:
    same = [({"d": torch.device("cpu"), "s": frozenset("ab")}, {"d": torch.device("meta"), "s": frozenset("ba")})]
    same += [((object(), X), (object(), X)), ([X.requires_grad_(True)], [X.detach()])]
    for one, other in same:
        assert number_of(one) == number_of(other)
        assert fingerprint(one) == fingerprint(other)
    for one, other in [((X, 1), (X, 1.0)), ((X, None), (X,)), ({"a": X}, {"b": X}), (X, X.view(6, 4)), ([], ())]:
        assert number_of(one) != number_of(other)
        assert fingerprint(one) != fingerprint(other)
