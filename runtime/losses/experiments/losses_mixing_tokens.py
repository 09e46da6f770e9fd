"""Losses and metrics that mix tokens, where sequences are cut into slices: found by moving one token far away.

    tokens      t0 t1 t2 t3 t4        moved      t0 t1 T2 t3 t4
    gradients   g0 g1 g2 g3 g4                   g0 g1  · g3 g4     all others stay, or scale alike: each is by itself
                                                 g0 G1  · G3 g4     a difference of neighbours, a window: mixed

A metric has no gradients: moving one token and all others at once changes it by the sum of both changes. The argument
`examination` is a `LossExamination`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .loss_parts import LossParts, along_tokens, is_mask, ratio_of

OF_SLICES = "it is not the same over slices of the sequences, into which they are cut here"
_FAR = (1.0, 1000.0)
_RESIDUE, _LEAST, _NEAR = 1e-6, 1e-9, 1e-3


def mixes_tokens(examination: Any) -> bool:
    """Return whether a token's gradient depends on what another token has; False where nothing can be tried."""
    for cut, token, far in _places(examination):
        moved = _moved(cut, torch.arange(cut.first + cut.rest) == token, far, examination.ids)
        whole, other = (examination.try_once(some.outputs, some.targets) for some in (cut, moved))
        if whole is not None and other is not None and _is_unlike(cut, whole, other, token):
            return True
    return False


def mixes_values(examination: Any) -> bool:
    """Return the same of a metric, by its values."""
    for cut, token, far in _places(examination):
        is_one = torch.arange(cut.first + cut.rest) == token
        for base in (cut, cut.with_hits()):
            made = [base, *(_moved(base, where, far, examination.ids) for where in (is_one, ~is_one, is_one | ~is_one))]
            tried = [examination.try_once(some.outputs, some.targets) for some in made]
            values = [float(one.value) / (one.weight or 1.0) for one in tried if one is not None]
            if len(values) == len(made):
                plain, one, others, both = values
                if abs(both - one - others + plain) > _NEAR * max(map(abs, values)):
                    return True
    return False


def _places(examination: Any) -> Iterator[tuple[LossParts, int, float]]:
    """Yield parts along tokens, a token that is to be moved, and how far."""
    parts = examination.usable(is_long=True)
    cut = None if parts is None else along_tokens(parts)
    if cut is not None:
        length = cut.first + cut.rest
        yield from ((cut, token, far) for token in dict.fromkeys((length // 2, 0, length - 1)) for far in _FAR)


def _moved(cut: LossParts, where: Tensor, far: float, ids: Sequence[int]) -> LossParts:
    """Return the variant with other numbers in some tokens, `where` (tokens,); ignored targets and masks stay."""

    def away(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            ramp = torch.arange(leaf[0, 0].numel(), dtype=leaf.dtype, device=leaf.device).view(leaf[0, 0].shape)
            other = leaf * -2 + far * (1 + ramp % 5)
        else:
            other = (leaf + 1) % max(int(leaf.max()) + 1, 1)
            ignored = torch.tensor(list(ids), device=leaf.device)
            other = torch.where(torch.isin(leaf, ignored) | torch.isin(other, ignored), leaf, other)
        return torch.where(where.to(leaf.device).view(1, -1, *[1] * (leaf.dim() - 2)), other, leaf)

    changed = [
        away(leaf)
        if unit and leaf.dim() > 1 and leaf.numel() and leaf.dtype is not torch.bool and not is_mask(leaf)
        else leaf
        for leaf, unit in zip((*cut.outputs, *cut.targets), cut.units, strict=True)
    ]
    split = len(cut.outputs)
    return replace(cut, outputs=changed[:split], targets=changed[split:])


def _is_unlike(cut: LossParts, whole: Any, moved: Any, token: int) -> bool:
    """Return whether gradients of tokens other than one are not all multiplied by one factor."""
    length = cut.first + cut.rest
    others = torch.tensor([k for k in range(length) if k != token])
    pairs = [
        (its.index_select(1, others.to(its.device)), mine.index_select(1, others.to(mine.device)))
        for number, (mine, its) in enumerate(zip(whole.gradients, moved.gradients, strict=True))
        if mine is not None and its is not None and cut.units[number]
    ]
    is_short = torch.float64 not in (whole.dtype, moved.dtype)
    residue = 1e-2 if is_short else _RESIDUE
    usual = sum(float(g.double().norm()) for g in whole.gradients if g is not None)
    if not pairs or all(not mine.any() and not its.any() for its, mine in pairs):
        return False
    return ratio_of(pairs, residue, 1e-5 if is_short else _LEAST, usual) == "unlike"
