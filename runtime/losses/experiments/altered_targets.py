"""Variants of the targets, with the same outputs, in which a loss may weigh them differently.

other rows' targets                          few of the lowest in one part, many of the highest in the other
other ids          in one part the lower ones; of classes, also ids that the data do not have
ignored targets    some or all of these in one part only: -100, -1, constants in the loss; zeros of masks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, prod

import torch
from torch import Tensor

from .loss_parts import LossParts, is_mask, taken
from .trial_call_modes import MadeUp

_MOST_IDS = 16
ChangeTargets = Callable[[Tensor], Tensor]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def with_ignored_tokens(parts: LossParts, ids: Sequence[int], *, is_safe: bool) -> Iterator[LossParts]:
    """Yield parts as they are, and with the last token of each sequence ignored."""
    yield parts
    for place, leaf in enumerate(parts.targets):
        if not parts.units[len(parts.outputs) + place] or parts.rest < 2:
            continue
        if leaf.dtype in _INTEGERS:
            classes = _num_classes(parts, leaf) if is_safe and int(leaf.max()) < _num_classes(parts, leaf) else 0
            kept = torch.where(leaf < 0, 0, leaf)
            for one in ids if classes else ():
                yield _changed(parts, place, torch.where(kept == one, (one + 1) % classes, kept), rest=_ended(one))
        elif is_mask(leaf):
            yield _changed(parts, place, torch.ones_like(leaf), rest=_ended(0))


def _ended(value: int) -> ChangeTargets:
    def ended(leaf: Tensor) -> Tensor:
        changed = leaf.clone()
        changed[:, -1] = value
        return changed

    return ended


def with_other_targets(
    parts: LossParts, ids: Sequence[int], *, is_safe: bool, tables: Sequence[Tensor] = ()
) -> Iterator[LossParts]:
    """Yield parts with other targets; unless it `is_safe`, none with ids that the data do not have.

    Classes of extreme weight in the `tables` of class weights are among them.
    """
    yield from _by_rows(parts)
    parts = _telling_targets(parts, is_safe=is_safe)
    for place, leaf in enumerate(parts.targets):
        if not parts.units[len(parts.outputs) + place] or not leaf.numel():
            continue
        if leaf.dtype in _INTEGERS:
            yield from _by_ids(parts, place, leaf, ids, tables, is_safe=is_safe)
        elif leaf.dtype is torch.bool or leaf.is_floating_point():
            yield _changed(parts, place, leaf, lambda a: _every_third(a, 0))
            if is_mask(leaf):
                yield _changed(parts, place, leaf, torch.zeros_like, torch.ones_like)
                yield _changed(parts, place, leaf, torch.ones_like)
            if leaf.is_floating_point():
                odd = replace(parts, is_odd=is_mask(leaf))
                yield _changed(odd, place, leaf, lambda a: a * 0.5)
                for value in (-1, torch.nan):
                    yield _changed(odd, place, leaf, partial(_every_third, value=value))


def _telling_targets(parts: LossParts, *, is_safe: bool) -> LossParts:
    """Return parts in which not all targets of a leaf are ignored or masked, since these decide nothing."""
    targets = [*parts.targets]
    for place, leaf in enumerate(parts.targets):
        if parts.units[len(parts.outputs) + place] and leaf.numel():
            is_ignored = is_safe and leaf.dtype in _INTEGERS and int(leaf.max()) < 0
            if is_ignored and (classes := _num_classes(parts, leaf)):
                targets[place] = MadeUp.from_leaf(
                    _filled(leaf, torch.arange(classes, dtype=leaf.dtype, device=leaf.device))
                )
            elif is_mask(leaf) and not leaf.any():
                targets[place] = torch.ones_like(leaf)
    return replace(parts, targets=targets)


def _by_rows(parts: LossParts) -> Iterator[LossParts]:
    """Yield other samples' targets: in the first part as many of the lowest as of the highest, else few of them."""
    split, count = len(parts.outputs), parts.first + parts.rest
    keys = torch.zeros(count, dtype=torch.float64)
    for unit, leaf in zip(parts.units[split:], parts.targets, strict=True):
        if unit and leaf.numel():
            keys += leaf.reshape(count, -1).double().nan_to_num().mean(1).cpu()
    low, high = int(keys.argmin()), int(keys.argmax())
    if keys[low] == keys[high]:
        return
    places = [(low, high)[number % 2] for number in range(parts.first)]
    places += [low if number == 0 and parts.rest > 1 else high for number in range(parts.rest)]
    others = [taken(leaf, unit, places) for unit, leaf in zip(parts.units[split:], parts.targets, strict=True)]
    yield replace(parts, targets=others)


def _by_ids(
    parts: LossParts, place: int, leaf: Tensor, ids: Sequence[int], tables: Sequence[Tensor], *, is_safe: bool
) -> Iterator[LossParts]:
    """Yield other ids: the lower ones in the first part, all of them in the second; then ids that may be ignored."""
    known = leaf.unique()[:_MOST_IDS]
    pool = [int(one) for one in known]
    highest = int(leaf.max())
    classes = _num_classes(parts, leaf) if is_safe else 0
    if highest < classes or (is_safe and not classes and min(pool) >= 0):  # such as lengths
        most = classes if highest < classes else highest + 1
        extreme = {int(end) for table in tables if len(table) == most for end in (table.argmin(), table.argmax())}
        pool = sorted({*range(min(most, _MOST_IDS)), most - 1, *extreme, *(one for one in pool if one >= 0)})
    values = torch.tensor(pool, dtype=leaf.dtype, device=leaf.device)
    lower = values[: (len(pool) + 1) // 2]
    if len(pool) > 1:
        yield _changed(parts, place, leaf, lambda a: _filled(a, lower), lambda b: _filled(b, values))
        yield _changed(parts, place, leaf, lambda a: torch.full_like(a, pool[0]), lambda b: _filled(b, values))
        rows = parts.cut(len(parts.outputs) + place, leaf)[1].numel()
        for start in range(rows, len(pool), max(rows, 1)):  # ids for which there was no room
            rolled = values.roll(-start)
            yield _changed(parts, place, leaf, lambda a: _filled(a, lower), partial(_filled, values=rolled))
    for one in ids if highest < classes else ():
        advice = 'where none ever is, say loss_over="samples"'
        parts = replace(parts, words=f", where some targets are {one}, as ignored ones may be: {advice}")
        some = lambda a, one=one: _every_third(_filled(a, lower), one)  # noqa: E731
        yield _changed(parts, place, leaf, some, lambda b: _filled(b, values))
        yield _changed(parts, place, leaf, partial(torch.full_like, fill_value=one), lambda b: _filled(b, values))


def _num_classes(parts: LossParts, leaf: Tensor) -> int:
    """Return the number of classes of ids; 0: they may be no class ids, and no others are made up.

    Of several outputs with as many rows, the narrowest counts that has room for all ids; ids without one are groups, or
    lengths.
    """
    found, highest = list[int](), int(leaf.max())
    for out in parts.outputs:
        sizes = out.shape
        if out.is_floating_point() and len(sizes) > 1:
            for classes, others in ((sizes[-1], sizes[:-1]), (sizes[1], (sizes[0], *sizes[2:]))):
                if leaf.shape == others or (leaf.dim() == 1 and leaf.numel() == prod(others)):
                    found.append(classes)
    return min((classes for classes in found if classes > highest), default=0)


def _same(leaf: Tensor) -> Tensor:
    return leaf


def _changed(
    parts: LossParts, place: int, leaf: Tensor, first: ChangeTargets = _same, rest: ChangeTargets = _same
) -> LossParts:
    """Return parts with another leaf of targets, changed in each part."""
    a, b = parts.cut(len(parts.outputs) + place, leaf)
    targets = [*parts.targets]
    targets[place] = MadeUp.from_leaf(torch.cat([first(a), rest(b)], parts.along))
    return replace(parts, targets=targets)


def _every_third(leaf: Tensor, value: float) -> Tensor:
    changed, row = leaf.clone().flatten(), leaf[0].numel()
    changed[:: next(step for step in (3, 5, 7, row + 1) if gcd(step, row) == 1)] = value  # reach all columns
    return changed.view_as(leaf)


def _filled(leaf: Tensor, values: Tensor) -> Tensor:
    places = torch.arange(leaf.numel(), device=leaf.device) % len(values)
    return values[places].view_as(leaf)
