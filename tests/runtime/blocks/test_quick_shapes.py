"""Shapes and errors computed without running layers on the meta device: they equal torch's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quintsched.runtime.blocks import quick_shapes
from quintsched.runtime.blocks.quick_shapes import QuickShapes

SHAPES = [(), (4,), (3, 4), (2, 3, 4), (2, 0, 4), (3, 2), (1, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


class Odd(Tensor):
    """A tensor of a class of its own."""


def tensors() -> list[Any]:
    plain = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in product(SHAPES, DTYPES)]
    turned = [torch.empty(4, 3, device="meta").t(), torch.empty(2, 4, 3, device="meta").transpose(1, 2)]
    others = [torch.empty(3, 4), nn.Parameter(torch.empty(3, 4, device="meta")), plain[6].as_subclass(Odd), 2.0, None]
    return [*plain, *turned, *others]


def said(call: Callable[[], Any]) -> Any:
    """Return what a call gives, but for numbers, or the error that it raises."""
    try:
        found = call()
    except Exception as error:
        return type(error), str(error)
    return type(found), found.shape, found.dtype, found.stride(), found.device, found.requires_grad


def calls_of_one(x: Any) -> list[Callable[[], Any]]:
    return [
        lambda: F.layer_norm(x, ()),
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: F.gelu(x, approximate="other"),
    ]


def calls_of_two(x: Any, y: Any) -> list[Callable[[], Any]]:
    return [
        lambda: F.linear(x, y),
        lambda: F.linear(x, torch.empty(5, 4, device="meta"), y),
        lambda: F.linear(x, torch.empty(3, 4, device="meta"), bias=y),
        lambda: F.layer_norm(x, (4,), y),
        lambda: F.layer_norm(x, (4,), None, bias=y, eps=1e-3),
        lambda: F.layer_norm(x, (3, 4), y, y),
        lambda: x + y,
        lambda: torch.add(x, y),
        lambda: torch.add(x, y, alpha=2),
        lambda: x.add(y),
    ]


def test_it_is_what_torch_finds() -> None:
    some = tensors()
    with torch.no_grad():
        for x in (x for x in some if isinstance(x, Tensor)):
            for call in (*calls_of_one(x), *(call for y in some for call in calls_of_two(x, y))):
                expected = said(call)
                with QuickShapes():
                    assert said(call) == expected, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_common_layers_are_not_computed(dtype: torch.dtype) -> None:
    computed: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in quick_shapes._RULES:
                computed.append(func)
            return func(*args, **(kwargs or {}))

    layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4, bias=False))
    layers = layers.to("meta", dtype)
    x = torch.empty(2, 3, 4, dtype=dtype, device="meta")
    with torch.no_grad(), Watch(), QuickShapes():
        assert (layers(x) + x).shape == x.shape
    assert not computed
