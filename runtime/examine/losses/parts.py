"""Batches of two unlike parts, made of a few rows of a real output, on which a loss is tried.

    rows of a microbatch   x0 x1 x2        o = x0 .9x1 | .8x2 .7x0 .6x1 .5x2        two rows against four
                                                a      |          b

as they are        and with either part scaled down: what a mean is over does not depend on outputs
one of many far away by which thresholds of a batch are met, that a few samples have not
what belongs to no sample   moved, for terms that it has not yet, as of weights that begin at 0
other rows' targets                          few of the lowest in one part, many of the highest in the other
other ids          in one part the lower ones; where they are of classes, also such as the data have not
ignored targets    some or all of these in one part only: -100, -1, numbers that the loss knows of; zeros of masks
along the tokens   the first third of each sequence against the rest

Large outputs are first cut short along what targets run along too, such as tokens. No more memory is taken than that of
two microbatches, or 32 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor

from ...blocks.trees import Tree
from .calls_checked import MadeUp

_ROWS, _FREE_BYTES = 6, 32 << 20
_TOKENS, _LARGE_BYTES = 6, 4 << 20
_MANY, _FAR = 32, (1000.0, -1000.0, 30.0, 0.01)
_MOST_IDS = 16
_HITS, _SURE = 3, 10.0
_SCALES = ((1, 0.5), (0.5, 1), (0.01, 0.1), (1, 0.1), (1, 10), (100, 10))
_OTHER_SIDE = ((-1, -0.5), (-10, -30))
Change = Callable[[Tensor], Tensor]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Given(Protocol):
    """Leaves of an output and of targets."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Those of the output."""

    @property
    def targets(self) -> Sequence[Tensor]:
        """Those of the targets."""


@dataclass(frozen=True)
class Parts:
    """Leaves of an output and of targets, of which a first part is told from a second.

    Attributes:
        outputs, targets: their leaves.
        first, rest: how many samples, or tokens, each part has.
        along: the dimension that is cut: 0 samples, 1 tokens.
        units: of each leaf, outputs' first: how many rows belong to one of these; 0: the leaf belongs to all of them.
        is_odd: whether masks have numbers that these may never have.
        words: what is other than usual in it.
    """

    outputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    first: int
    rest: int
    along: int
    units: Sequence[int]
    is_odd: bool = False
    words: str = ""

    @property
    def share(self) -> float:
        """The first part's share of the samples, or tokens."""
        return self.first / (self.first + self.rest)

    def halves(self) -> tuple[tuple[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]:
        """Return outputs and targets of the first part, and of the second."""
        leaves = [self.cut(number, leaf) for number, leaf in enumerate((*self.outputs, *self.targets))]
        count = len(self.outputs)
        one, other = [a for a, _ in leaves], [b for _, b in leaves]
        return (one[:count], one[count:]), (other[:count], other[count:])

    def cut(self, number: int, leaf: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of a leaf, or of its gradient."""
        unit = self.units[number]
        if not unit:
            return leaf, leaf
        return leaf.narrow(self.along, 0, self.first * unit), leaf.narrow(
            self.along, self.first * unit, self.rest * unit
        )

    def of_all_sizes(self) -> Iterator[Parts]:
        """Yield the same, with numbers of other sizes, so that what is a threshold of some lies between both parts."""
        yield self
        for first, rest in _SCALES:
            yield self.scaled(first, rest)
            if any(self._is_free(len(self.outputs) + i, t) and not _is_mask(t) for i, t in enumerate(self.targets)):
                yield self.scaled(first, rest, with_targets=True)

    def on_other_side(self) -> Iterator[Parts]:
        """Yield the same with numbers of the other sign, where a loss may have a gradient, as one of `relu` has."""
        for first, rest in _OTHER_SIDE:
            yield self.scaled(first, rest)

    def with_one_far(self) -> Iterator[Parts]:
        """Yield more samples, where memory allows it, of which the first is far from all others."""
        split, known = len(self.outputs), self.first + self.rest
        if sum(leaf.nbytes for leaf in self.outputs) * _MANY > _LARGE_BYTES * known:
            return
        places, scales = [number % known for number in range(_MANY)], [1 - 0.1 * (n % 4) for n in range(_MANY)]
        units = self.units[:split], self.units[split:]
        outputs = [_taken(leaf, unit, places, scales) for leaf, unit in zip(self.outputs, units[0], strict=True)]
        targets = [_taken(leaf, unit, places) for leaf, unit in zip(self.targets, units[1], strict=True)]
        many = replace(self, outputs=outputs, targets=targets, first=1, rest=_MANY - 1)
        for scale in _FAR:
            yield many.scaled(scale, 1)

    def with_hits(self) -> Parts:
        """Return the same where the first rows are all but their targets, of which a loss is next to nothing."""
        outputs = list(self.outputs)
        for place, leaf in enumerate(outputs):
            for targets in self.targets if self._is_free(place, leaf) else ():
                if targets.dtype is torch.int64 and leaf.shape[:-1] == targets.shape:
                    wanted = targets.clamp(0, leaf.shape[-1] - 1).unsqueeze(-1)
                    hits = leaf.scatter(-1, wanted, float(leaf.abs().max()) + _SURE)
                elif targets.is_floating_point() and targets.shape == leaf.shape:
                    hits = targets.to(leaf) + 0.01 * leaf
                else:
                    continue
                first = torch.arange(len(leaf), device=leaf.device).view(-1, *[1] * (leaf.dim() - 1)) < _HITS
                outputs[place] = torch.where(first, hits, leaf)
                break
        return replace(self, outputs=outputs)

    def with_other_rest(self) -> Iterator[Parts]:
        """Yield the same where what of the output belongs to no sample is another, if there is such."""
        others = [
            t if unit or not t.is_floating_point() else _moved_on(t)
            for t, unit in zip(self.outputs, self.units, strict=False)
        ]
        if any(other is not t for other, t in zip(others, self.outputs, strict=True)):
            yield replace(self, outputs=others)

    def scaled(self, first: float, rest: float, *, with_targets: bool = False) -> Parts:
        """Return the same with the parts' outputs multiplied, those of samples, and the numbers among their targets."""
        leaves = (*self.outputs, *self.targets) if with_targets else self.outputs
        made = [
            torch.cat([a * first, b * rest], self.along) if self._is_free(i, t) and not _is_mask(t) else t
            for i, t in enumerate(leaves)
            for a, b in [self.cut(i, t)]
        ]
        split = len(self.outputs)
        return replace(self, outputs=made[:split], targets=made[split:] if with_targets else self.targets)

    def _is_free(self, number: int, leaf: Tensor) -> bool:
        return bool(self.units[number]) and leaf.is_floating_point()


def _moved_on(rest: Tensor) -> Tensor:
    steps = torch.arange(rest.numel(), device=rest.device, dtype=rest.dtype) % 7
    return rest * 1.25 + (0.25 + 0.03125 * steps).view_as(rest)


def shortened(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], samples: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return large outputs and their targets with the first few of what both have many of, such as tokens."""
    if sum(leaf.nbytes for leaf in outputs) * _ROWS <= _LARGE_BYTES * samples:
        return outputs, targets
    sizes = {size for leaf in targets for size in leaf.shape[1:]}
    sizes |= {len(leaf) // samples for leaf in targets if leaf.dim() == 1 and len(leaf) % samples == 0}
    long = {size for leaf in outputs for size in leaf.shape[1:] if size > _TOKENS and size in sizes}

    def short(leaf: Tensor) -> Tensor:
        if leaf.dim() == 1 and len(leaf) // samples in long and len(leaf) % samples == 0:
            return leaf.view(samples, -1)[:, :_TOKENS].flatten()
        for dim, size in enumerate(leaf.shape[1:], 1):
            leaf = leaf.narrow(dim, 0, _TOKENS) if size in long else leaf
        return leaf

    return [short(leaf) for leaf in outputs], [short(leaf) for leaf in targets]


def along_samples(outputs: Sequence[Tensor], targets: Sequence[Tensor], samples: int, units: Sequence[int]) -> Parts:
    """Return parts of unlike numbers of samples, of which leaves have rows, where memory allows it."""
    size = sum(leaf.nbytes for leaf in outputs) // samples
    count = _ROWS if 2 * samples >= _ROWS or _ROWS * size <= _FREE_BYTES else 2 * samples
    first = 2 if count == _ROWS else 1
    places = [number % samples for number in range(count)]
    scales = [1 - 0.1 * number for number in range(count)]
    split = len(outputs)
    return Parts(
        [_taken(leaf, unit, places, scales) for leaf, unit in zip(outputs, units[:split], strict=True)],
        [_taken(leaf, unit, places) for leaf, unit in zip(targets, units[split:], strict=True)],
        first,
        count - first,
        0,
        units,
    )


def cut_elsewhere(parts: Parts) -> Parts:
    """Return the same samples, of which the first part has one alone."""
    return replace(parts, first=1, rest=parts.first + parts.rest - 1)


def along_tokens(parts: Parts) -> Parts | None:
    """Return the same samples cut along their tokens; None where outputs and targets have not as many."""
    lengths = {leaf.shape[1] for leaf in parts.targets if leaf.dim() > 1}
    cut = [leaf for i, leaf in enumerate(parts.outputs) if parts.units[i] and leaf.is_floating_point()]
    if len(lengths) != 1 or not cut or any(leaf.dim() < 2 or leaf.shape[1] not in lengths for leaf in cut):
        return None
    (length,) = lengths
    if length < 2:
        return None
    leaves = (*parts.outputs, *parts.targets)
    units = [int(leaf.dim() > 1 and leaf.shape[1] == length) for leaf in leaves]
    first = max(1, length // 3)
    return replace(parts, first=first, rest=length - first, along=1, units=units)


def with_ignored_tokens(parts: Parts, ids: Sequence[int], *, is_safe: bool) -> Iterator[Parts]:
    """Yield such parts as they are, and with the last token of each sequence ignored."""
    yield parts
    for place, leaf in enumerate(parts.targets):
        if not parts.units[len(parts.outputs) + place] or parts.rest < 2:
            continue
        if leaf.dtype in _INTEGERS:
            classes = _num_classes(parts, leaf) if is_safe and int(leaf.max()) < _num_classes(parts, leaf) else 0
            kept = torch.where(leaf < 0, 0, leaf)
            for one in ids if classes else ():
                yield _changed(parts, place, torch.where(kept == one, (one + 1) % classes, kept), rest=_ended(one))
        elif _is_mask(leaf):
            yield _changed(parts, place, torch.ones_like(leaf), rest=_ended(0))


def _ended(value: int) -> Change:
    def ended(leaf: Tensor) -> Tensor:
        changed = leaf.clone()
        changed[:, -1] = value
        return changed

    return ended


def with_other_targets(
    parts: Parts, ids: Sequence[int], *, is_safe: bool, tables: Sequence[Tensor] = ()
) -> Iterator[Parts]:
    """Yield the same outputs with other targets; unless it `is_safe`, none that the data have not.

    Of the `tables` of class weights those classes are among them whose weights are extreme.
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
            if _is_mask(leaf):
                yield _changed(parts, place, leaf, torch.zeros_like, torch.ones_like)
                yield _changed(parts, place, leaf, torch.ones_like)
            if leaf.is_floating_point():
                odd = replace(parts, is_odd=_is_mask(leaf))
                yield _changed(odd, place, leaf, lambda a: a * 0.5)
                for value in (-1, torch.nan):
                    yield _changed(odd, place, leaf, partial(_every_third, value=value))


def _telling_targets(parts: Parts, *, is_safe: bool) -> Parts:
    """Return the same where not all targets of a leaf are ignored, nor masked, as nothing is told of such."""
    targets = [*parts.targets]
    for place, leaf in enumerate(parts.targets):
        if parts.units[len(parts.outputs) + place] and leaf.numel():
            is_ignored = is_safe and leaf.dtype in _INTEGERS and int(leaf.max()) < 0
            if is_ignored and (classes := _num_classes(parts, leaf)):
                targets[place] = MadeUp.of(_filled(leaf, torch.arange(classes, dtype=leaf.dtype, device=leaf.device)))
            elif _is_mask(leaf) and not leaf.any():
                targets[place] = torch.ones_like(leaf)
    return replace(parts, targets=targets)


def _by_rows(parts: Parts) -> Iterator[Parts]:
    """Give other samples' targets: in the first part as many of the lowest as of the highest, else few of them."""
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
    taken = [_taken(leaf, unit, places) for unit, leaf in zip(parts.units[split:], parts.targets, strict=True)]
    yield replace(parts, targets=taken)


def _by_ids(
    parts: Parts, place: int, leaf: Tensor, ids: Sequence[int], tables: Sequence[Tensor], *, is_safe: bool
) -> Iterator[Parts]:
    """Give other ids: the lower ones in the first part, all of them in the second; then such as may be ignored."""
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
        for start in range(rows, len(pool), max(rows, 1)):  # those that there was no room for
            rolled = values.roll(-start)
            yield _changed(parts, place, leaf, lambda a: _filled(a, lower), partial(_filled, values=rolled))
    for one in ids if highest < classes else ():
        some = lambda a, one=one: _every_third(_filled(a, lower), one)  # noqa: E731
        yield _changed(parts, place, leaf, some, lambda b: _filled(b, values))
        yield _changed(parts, place, leaf, partial(torch.full_like, fill_value=one), lambda b: _filled(b, values))


def _num_classes(parts: Parts, leaf: Tensor) -> int:
    """Return of how many classes ids are; 0: they may be something else, of which no others are made up.

    Of several outputs that have as many rows, these are the classes of the narrowest that has a place for all ids; such
    as have none are groups, or lengths.
    """
    found, highest = list[int](), int(leaf.max())
    for out in parts.outputs:
        sizes = out.shape
        if out.is_floating_point() and len(sizes) > 1:
            for classes, others in ((sizes[-1], sizes[:-1]), (sizes[1], (sizes[0], *sizes[2:]))):
                if leaf.shape == others or (leaf.dim() == 1 and leaf.numel() == prod(others)):
                    found.append(classes)
    return min((classes for classes in found if classes > highest), default=0)


def _is_mask(leaf: Tensor) -> bool:
    is_number = leaf.is_floating_point() or leaf.dtype is torch.bool
    return is_number and bool(((leaf == 0) | (leaf == 1)).all())


def _same(leaf: Tensor) -> Tensor:
    return leaf


def _changed(parts: Parts, place: int, leaf: Tensor, first: Change = _same, rest: Change = _same) -> Parts:
    """Return the same with another leaf of targets, whose parts are changed."""
    a, b = parts.cut(len(parts.outputs) + place, leaf)
    targets = [*parts.targets]
    targets[place] = MadeUp.of(torch.cat([first(a), rest(b)], parts.along))
    return replace(parts, targets=targets)


def _every_third(leaf: Tensor, value: float) -> Tensor:
    changed, row = leaf.clone().flatten(), leaf[0].numel()
    changed[:: next(step for step in (3, 5, 7, row + 1) if gcd(step, row) == 1)] = value  # in all columns
    return changed.view_as(leaf)


def _filled(leaf: Tensor, values: Tensor) -> Tensor:
    places = torch.arange(leaf.numel(), device=leaf.device) % len(values)
    return values[places].view_as(leaf)


def rows_of_leaves(tree: Tree, leaves: Sequence[Tensor], samples: int, apart: Collection[str] = ()) -> list[int]:
    """Return how many rows of each leaf of a tree belong to a sample; 0: it belongs to all, as those `apart` do."""
    rows = [rows_of_each(leaf, samples) for leaf in leaves]
    return [0 if path in apart else n for path, n in zip(tree.paths, rows, strict=True)] if apart else rows


def rows_of_each(leaf: Tensor, samples: int) -> int:
    """Return how many rows of a leaf belong to each sample; 0: it belongs to all."""
    return leaf.shape[0] // samples if leaf.dim() and leaf.shape[0] and leaf.shape[0] % samples == 0 else 0


def _taken(leaf: Tensor, unit: int, places: Sequence[int], scales: Sequence[float] | None = None) -> Tensor:
    """Return the rows of some samples, those of outputs scaled."""
    if not unit:
        return leaf
    rows = leaf.reshape(-1, unit, *leaf.shape[1:])[places]
    if scales is not None and leaf.is_floating_point():
        rows = _telling(rows)
        rows = rows * torch.tensor(scales, dtype=leaf.dtype, device=leaf.device).view(-1, *[1] * (rows.dim() - 1))
    return rows.flatten(0, 1)


def _telling(rows: Tensor) -> Tensor:
    """Return numbers without such as are not finite; others, where all are zero."""
    if rows.any():
        return rows.nan_to_num(0.5, 1.5, -1.5)
    return (torch.arange(rows.numel(), device=rows.device) % 7 + 1).div(8).to(rows.dtype).view_as(rows)


def ratio_of(
    pairs: Sequence[tuple[Tensor, Tensor | None]], tolerance: float, least: float, usual: float
) -> float | str:
    """Return by what gradients of a part are multiplied in the whole; "none": there are none; "unlike": by nothing.

    Each row of them has to be, up to a tolerance of its own and to the least that can be told of gradients of `usual`
    size, since of those of large outputs little may be left but rounding.
    """
    whole = torch.cat([mine.flatten().double() for mine, _ in pairs]) if pairs else torch.zeros(1)
    parts = [torch.zeros_like(mine) if alone is None else alone for mine, alone in pairs]
    alone = torch.cat([part.flatten().double() for part in parts]) if pairs else torch.zeros(1)
    size, of_whole = float(alone.norm()), float(whole.norm())
    floor = least * max(of_whole, size * 1e-3, usual)
    if size <= max(1e-12 * max(of_whole, 1e-30), least * usual):
        return "unlike" if of_whole > max(1e-12, 10 * floor) else "none"
    ratio = float(whole @ alone) / size**2
    width = next((mine.shape[-1] for mine, _ in pairs if mine.dim() > 1), 1)
    width = width if all(mine.dim() > 1 and mine.shape[-1] == width for mine, _ in pairs) else 1
    off, rows = (whole - ratio * alone).view(-1, width).norm(dim=1), whole.view(-1, width).norm(dim=1)
    return "unlike" if bool((off > tolerance * rows + floor).any()) else ratio
