"""Draws of a block that is proved: whole and cut alike, and the training's generators stay as they are.

Without dropout few blocks draw at all. Each function that does is run with torch's generators seeded by its number in
the run, and these are restored behind it; ranks that are threads share them, so nobody else draws meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quintsched.errors import MisfitError

from ....blocks.blocks import seeded
from ...draws.mode import KeyedDraws
from ...draws.names import DRAWS
from ...dropout import BY_SAMPLES, CutSite, Masks, Unit
from ..twins import SEED

Drawn = tuple[tuple[int, ...], bool]
"""A shape that is drawn, and whether that is between columns and rows."""

Shapes = Mapping[str, Sequence[Drawn]]
"""What is drawn, by sites."""


@contextmanager
def undisturbed(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """A context for one run of a block, which records gradients; by other seeds it draws other numbers."""
    with torch.enable_grad(), _OwnDraws(device, seed):
        yield


class _OwnDraws(TorchFunctionMode):
    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._device, self._seed, self._count = device, seed, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in DRAWS or (kwargs or {}).get("generator") is not None:
            return func(*args, **(kwargs or {}))
        self._count += 1
        with seeded(self._seed, self._count, self._device):
            return func(*args, **(kwargs or {}))


class DrawnShapes(KeyedDraws):
    """Notes of which shapes a twin draws, at which sites.

    Args:
        number: of the block.
        twin: a copy of it.
    """

    def __init__(self, number: int, twin: nn.Module) -> None:
        self._numbers = Masks(SEED)
        super().__init__(self._numbers, {number: twin})
        self.found: dict[str, list[Drawn]] = {}
        self._open: list[tuple[str, int]] = []

    @contextmanager
    def noting(self, samples: int) -> Iterator[None]:
        """A context in which the twin runs, given so many samples."""
        with self._numbers.of(Unit(0, range(samples))), self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._open.clear()
        result = super().__torch_function__(func, types, args, kwargs)
        for site, number in self._open if isinstance(result, Tensor) else ():
            self._note(site, number, result.shape)
        return result

    def _note(self, site: str, number: int, shape: Sequence[int]) -> None:
        self.found.setdefault(site, []).append((tuple(shape), self._cut(site, number) is not None))

    def words(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return words for what is drawn now, and note the shape."""
        self._note(*self._keyed_site(), shape)
        return super().words(shape, device)

    def seed(self) -> int:
        """Return a seed for what is drawn now, whose shape is noted when it is there."""
        self._open.append(self._keyed_site())
        return super().seed()


def unusual_parts(whole: Shapes, of_one: Shapes, cut: Shapes, size: int, rows: int) -> dict[CutSite, int | None]:
    """Return the sites where a rank of `size` draws for a part of what one process draws that is none of the usual.

    To the dimension along which it is a part, or `BY_SAMPLES`, or None where it is not. Usual are, between columns and
    rows, features in the last dimension, or heads in the second of four; elsewhere tokens in the second, or, with
    samples, as one of `rows` in the first. `of_one` is drawn for the first sample alone. Raises `MisfitError` where
    calls of one site differ.
    """
    found: dict[CutSite, set[int | None]] = {}
    for site, drawn in cut.items():
        for one, alone, other in zip(whole.get(site, ()), of_one.get(site, ()), drawn, strict=False):
            found.setdefault((site, other[1]), set()).add(_part(one, alone, other, size, rows))
    odd = next((site for (site, _), parts in found.items() if len(parts) > 1), None)
    if odd is not None:
        raise MisfitError(f"{odd.partition(':')[0]!r} draws for cut tensors and for others; call two modules")
    return {site: part for site, (part,) in found.items() if part != _USUAL}


_USUAL = -2


def _part(whole: Drawn, of_one: Drawn, cut: Drawn, size: int, rows: int) -> int | None:
    (shape, _), (alone, _), (part, between) = whole, of_one, cut
    dims = len(shape)
    dim = next((d for d in range(min(dims, len(part))) if shape[d] == part[d] * size and shape[d] != part[d]), None)
    if between:
        if dim == (1 if dims > 3 else dims - 1) and dims > 1:
            return _USUAL
        return BY_SAMPLES if dim == 0 and shape[0] != alone[0] else dim
    return _USUAL if (dim == 1 and dims > 2) or (dim == 0 and shape[0] == rows) else dim
