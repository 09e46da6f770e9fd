"""Draws of a block that is proved: whole and cut alike, and the training's generators stay as they are.

Without dropout few blocks draw at all. A run's draws are those of generators that are seeded before it, and as they
were behind it; ranks that are threads share them, so nobody else draws meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ....comm import Group
from ....comm.device import SeededGenerators
from ...draws import BlockDraws
from ...dropout import BY_SAMPLES, WORD, CutSite, Masks, Unit
from ..arrivals import Arrival
from ..trial import outputs_of
from ..twins import SEED

Drawn = tuple[tuple[int, ...], bool]
"""A shape that is drawn, and whether that is between columns and rows."""

Shapes = Mapping[str, Sequence[Drawn]]
"""What is drawn, by sites."""


@contextmanager
def undisturbed(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """A context for one run of a block, which records gradients; by other seeds it draws other numbers."""
    with torch.enable_grad(), SeededGenerators(seed, device):
        yield


class NotedMasks(Masks):
    """Notes of which shapes dropouts draw, at which sites; they drop nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(SEED, device)
        self.found: dict[str, list[Drawn]] = {}

    def words_of_part(
        self, site: str, draw: Callable[..., Tensor], shape: Sequence[int], cut: Group | None, sliced: Group | None
    ) -> Tensor:
        """Note a shape, and return words by which all numbers stay."""
        self.found.setdefault(site, []).append((tuple(shape), cut is not None))
        return torch.full(tuple(shape), WORD, device=self.device)


def note_draws(twin: nn.Module, number: int, arrival: Arrival, masks: NotedMasks, sliced: Group | None) -> Shapes:
    """Run the twin of block `number` in training, and return which shapes its dropouts draw, which `masks` note.

    `sliced` are the ranks over which it is given slices of the tokens. Raises `MisfitError` for other draws that ranks
    may not do where they have a part of what one process has.
    """
    draws = BlockDraws(masks, {number: twin.train()}, lambda number: sliced)
    with torch.no_grad(), masks.of(Unit(0, range(arrival.samples))), draws.running(number):
        outputs_of(twin, arrival, sliced=sliced)
    return masks.found


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
