"""Random draws in trial runs: equal for whole and cut blocks, without disturbing the generators of the training.

Without dropout few blocks draw at all. Generators are seeded before a run and restored after it. Ranks that are threads
share them, so the generators are locked meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ....comm import Group
from ....comm.random_generators import SeededGenerators
from ...mesh_independent_dropout import BY_SAMPLES, WORD, CutSite, Masks, MaskUnit
from ...seeded_block_draws import BlockDraws
from ..block_twins import SEED
from ..trial_inputs import Arrival
from ..twin_runs import outputs_of

Drawn = tuple[tuple[int, ...], bool]
"""Shape of a mask, and whether it is drawn between columns and rows."""

Shapes = Mapping[str, Sequence[Drawn]]
"""Shapes of the masks drawn, by site, in order of the calls."""


@contextmanager
def undisturbed(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """Context for one run of a block with grad mode on, and generators seeded by `seed`; restores them."""
    with torch.enable_grad(), SeededGenerators(seed, device):
        yield


class NotedMasks(Masks):
    """Masks that record the shapes drawn at each site, and drop nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(SEED, device)
        self.found: dict[str, list[Drawn]] = {}

    def words_of_part(
        self, site: str, draw: Callable[..., Tensor], shape: Sequence[int], cut: Group | None, sliced: Group | None
    ) -> Tensor:
        """Record a shape, and return words that keep all elements."""
        self.found.setdefault(site, []).append((tuple(shape), cut is not None))
        return torch.full(tuple(shape), WORD, device=self.device)


def note_draws(twin: nn.Module, number: int, arrival: Arrival, masks: NotedMasks, sliced: Group | None) -> Shapes:
    """Run the twin of block `number` in training mode, and return the shapes of its dropout masks, by `masks`.

    `sliced` is the group over which its input tokens are sliced. Raises `MisfitError` for other draws that a rank must
    not make for its part of a tensor.
    """
    draws = BlockDraws(masks, {number: twin.train()}, lambda number: sliced)
    with torch.no_grad(), masks.draw_for(MaskUnit(0, range(arrival.samples))), draws.running(number):
        outputs_of(twin, arrival, sliced=sliced)
    return masks.found


def unusual_parts(whole: Shapes, of_one: Shapes, cut: Shapes, size: int, rows: int) -> dict[CutSite, int | None]:
    """Return the sites where a rank of `size` draws for a tensor cut along an unusual dimension, to that dimension.

    The dimension is `BY_SAMPLES` for heads fused with samples, None for an uncut tensor. Usual are, between columns and
    rows, features in the last dimension, or heads in the second of four; elsewhere tokens in the second dimension, or
    fused with samples (`rows`) in the first. `of_one` is drawn for the first sample alone. Raises `MisfitError` if
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
