"""Draws of a block that is proved: whole and cut alike, and the training's generators stay as they are.

Without dropout few blocks draw at all. Each function that does is run with torch's generators seeded by its number in
the run, and these are restored behind it; ranks that are threads share them, so nobody else draws meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...blocks.blocks import seeded
from .twins import SEED

_FACTORIES = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
_SAMPLERS = {"normal", "bernoulli", "multinomial", "poisson", "binomial", "rrelu", "rrelu_", "gumbel_softmax"}
_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
_DRAWS = frozenset(_FACTORIES | _SAMPLERS | _IN_PLACE)
"""The names of what draws, besides those that end in "dropout"."""


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """A context for one run of a block, which records gradients."""
    with torch.enable_grad(), _OwnDraws(device):
        yield


class _OwnDraws(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._count = device, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _DRAWS and not name.endswith(("dropout", "dropout_")):
            return func(*args, **(kwargs or {}))
        self._count += 1
        with seeded(SEED, self._count, self._device):
            return func(*args, **(kwargs or {}))
