"""Variants of a first batch's extras and targets, under which a block may act differently later.

1 0 0 -inf ─▶ 0.7 0.4 0.6 -inf    True True ─▶ True False    7 9 8 ─▶ 9 7 7, 3 0 5, and some of them 0, -100, 1000

Extras with a row for each sample that are used as a whole: a block's output for one sample depends on others' rows.

    positions (8,) beside 8 samples of 8 tokens     each microbatch would get the rows of its own samples: refused
    lengths (8,)                                    row 1 changes what is given for sample 1 alone: cut with the samples

A block is run on two samples: with another row 1 of the extra, the output of sample 0 has to stay as it is, unless the
block mixes samples anyway. Where two rows do not fit and one does, they are no samples' either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.without_side_effects import untouched
from ..losses.experiments.trial_call_modes import MadeUp
from ..losses.save_and_restore_loss_state import reached_by
from ..parallel.cut_proofs.block_twins import FEW, SEED
from ..parallel.cut_proofs.trial_inputs import Arrival, GivenTree, TrialInput
from ..user_objects.library_or_user import constants_in
from .trial_block_runs import TriedBlock

_TRIED = (0, 1, 2, 3, 5, 10, 100)
_AMONG = (0, 1, 2, -100, -1)
"""Integers that are put among many: classes, and ids that may be ignored."""
_COUNTS = 9
_MOST, _LARGE = 16, 1 << 20
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Agree = Callable[[Sequence[float]], list[float]]


def others_of(arrival: Arrival, block: nn.Module, agree: Agree) -> Iterator[tuple[Arrival, str]]:
    """Yield a block's inputs with other numbers in its extras, and the difference, in words.

    Some may be invalid inputs. `agree` makes numbers equal on ranks that run the block together.
    """
    held = {(name, k): part.tensor for name, tree in arrival.extras.items() for k, part in enumerate(tree.parts)}
    held = {place: tensor for place, tensor in held.items() if _is_plain(tensor)}
    for draw in (_drawn, _counts):
        others = {place: draw(tensor) for place, tensor in held.items()}
        if any(other is not held[place] for place, other in others.items()):
            yield _with_extras(arrival, others), "where its extras are other numbers"
    named = _numbers_of(block, agree) if held else []
    for place, tensor in held.items():
        is_whole, few = _is_whole(tensor), tensor.numel() <= FEW
        for number in dict.fromkeys([*(_TRIED if few else _AMONG), *named] if is_whole or few else ()):
            if _fits(number, tensor):
                yield _with_extras(arrival, {place: _put(tensor, number)}), f"where {place[0]!r} holds {number}"


def _with_extras(arrival: Arrival, others: dict[tuple[str, int], Tensor]) -> Arrival:
    made = {place: MadeUp.from_leaf(other) for place, other in others.items()}
    extras = {
        name: GivenTree(
            [TrialInput(made.get((name, k), p.tensor), p.tokens) for k, p in enumerate(tree.parts)], tree.tree
        )
        for name, tree in arrival.extras.items()
    }
    return replace(arrival, extras=extras)


def _drawn(tensor: Tensor) -> Tensor:
    """Return other numbers of about the same size, or in the same range; flags flipped, a quarter of them if many."""
    generator = torch.Generator().manual_seed(SEED)
    if tensor.is_floating_point():
        share = 0.25 + 0.75 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        return torch.where(tensor == 0, share, tensor * share)
    if tensor.dtype is torch.bool and tensor.device.type == "cpu":
        return tensor ^ (torch.rand(tensor.shape, generator=generator) < (0.25 if tensor.numel() > FEW else 1))
    if not _is_whole(tensor):
        return tensor
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)


def _counts(tensor: Tensor) -> Tensor:
    """Return small counts in place of integers."""
    drawn = torch.randint(0, _COUNTS, tensor.shape, generator=torch.Generator().manual_seed(SEED))
    return drawn.to(tensor.dtype) if _is_whole(tensor) else tensor


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 0


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype in _WHOLE and tensor.device.type == "cpu"


def _fits(number: int, tensor: Tensor) -> bool:
    """Return whether a number fits the dtype of a tensor."""
    if not _is_whole(tensor):
        return tensor.is_floating_point()
    return torch.iinfo(tensor.dtype).min <= number <= torch.iinfo(tensor.dtype).max


def _put(tensor: Tensor, number: int) -> Tensor:
    """Return a tensor filled with a number if it is small; else with every third element replaced."""
    if tensor.numel() <= FEW:
        return torch.full_like(tensor, number)
    places = torch.arange(tensor.numel()).view(tensor.shape) % 3 == 0
    return tensor.masked_fill(places, number)


def _numbers_of(block: nn.Module, agree: Agree) -> list[int]:
    """Return integers from a block's own code, then integers that it holds, and the successor of the last."""
    reached = reached_by(block)
    code = {number for function in reached.functions() for number in _ints(constants_in(function.__code__))}
    held = set(_ints(reached.plain))
    found = [*sorted(code), *sorted(held - code)][:_MOST]
    found = [*found, *(number + 1 for number in found[-1:])]
    return [int(number) for number in agree([*found, *[0] * (_MOST + 1 - len(found))])]


def _ints(values: Iterable[Any]) -> Iterator[int]:
    return (value for value in values if type(value) is int and abs(value) < _LARGE)


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
