"""Extras with a row for each sample that are used as a whole: a block's output for one sample depends on others' rows.

    positions (8,) beside 8 samples of 8 tokens     each microbatch would get the rows of its own samples: refused
    lengths (8,)                                    row 1 changes what is given for sample 1 alone: cut with the samples

A block is run on two samples: with another row 1 of the extra, the output of sample 0 has to stay as it is, unless the
block mixes samples anyway. Where two rows do not fit and one does, they are no samples' either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..blocks.without_side_effects import untouched
from ..parallel.cut_proofs.trial_inputs import Arrival, GivenTree, TrialInput
from .block_runs import TriedBlock

_NEAR = 1e-4
OF_NO_SAMPLE = (
    "block {} ({}) uses {!r} for all samples alike, but it has as many rows as there are samples, so that each "
    "microbatch would get some of them; give it with one row, {}=value[None], or register it as a buffer of the block"
)


def extra_of_no_sample(tried: TriedBlock, arrival: Arrival, names: Sequence[str]) -> str | None:
    """Return the first of the named extras that belongs to no sample; None: they all do, or it cannot be told.

    `arrival` has two samples, and a row of each extra for either.
    """

    def made(given: Arrival) -> list[Tensor] | None:
        try:
            with untouched(tried.block), tried.alike(range(given.samples)):
                return tried.floating_outputs(given)
        except Exception:  # errors of user code on batches that it never gets
            return None

    whole = made(arrival)
    if whole is None:
        one_row = (name for name in names if made(_with_extra(arrival, name, _first_row)) is not None)
        return next(one_row, None)
    moved = made(replace(arrival.changed(_moved), extras=arrival.extras))
    mixes = moved is None or _differ(whole, moved)
    return None if mixes else next((n for n in names if _depends(whole, made(_with_extra(arrival, n, _moved)))), None)


def _depends(whole: Sequence[Tensor], found: Sequence[Tensor] | None) -> bool:
    return found is not None and _differ(whole, found)


def _with_extra(arrival: Arrival, name: str, change: Callable[[TrialInput], TrialInput]) -> Arrival:
    extras: dict[str, GivenTree] = {**arrival.extras, name: arrival.extras[name].changed(change)}
    return replace(arrival, extras=extras)


def _first_row(given: TrialInput) -> TrialInput:
    return replace(given, tensor=given.tensor[:1]) if given.tensor.dim() else given


def _moved(given: TrialInput) -> TrialInput:
    """Return it with another second row: other numbers, or, of whole numbers, those of the first row."""
    tensor = given.tensor.clone()
    if tensor.dim() and len(tensor) > 1:
        tensor[1] = tensor[1] * 0.5 + 0.25 if tensor.is_floating_point() else tensor[0]
    return replace(given, tensor=tensor)


def _differ(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether the outputs of the first sample differ."""
    pairs = [(a[0], b[0]) for a, b in zip(one, other, strict=False) if a.dim() and b.dim() and len(a) and len(b)]
    return any(
        a.shape != b.shape or not torch.allclose(a.nan_to_num(), b.nan_to_num(), rtol=_NEAR, atol=_NEAR * _size(a))
        for a, b in pairs
    )


def _size(tensor: Tensor) -> float:
    return float(tensor.nan_to_num().abs().max()) if tensor.numel() else 0.0
