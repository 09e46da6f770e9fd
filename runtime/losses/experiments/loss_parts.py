"""Batches of two unlike parts, made of a few rows of a real output, on which a loss is tried.

    rows of a microbatch   x0 x1 x2        o = x0 .9x1 | .8x2 .7x0 .6x1 .5x2        two rows against four
                                                a      |          b

as they are             and with either part scaled down: the reduction does not depend on outputs
one of many far away    to reach thresholds over a batch that a few samples do not reach
tensors of no sample    moved, to reveal terms that are 0 so far, as of weights that begin at 0
along the tokens        the first third of each sequence against the rest

Large outputs are first shortened along dimensions that targets share, such as tokens. No more memory is used than
that of two microbatches, or 32 MB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...blocks.trees import Tree

_ROWS, _FREE_BYTES = 6, 32 << 20
_TOKENS, _LARGE_BYTES = 6, 4 << 20
_MANY, _FAR = 32, (1000.0, -1000.0, 30.0, 0.01)
_HITS, _SURE = 3, 10.0
_SCALES = ((1, 0.5), (0.5, 1), (0.01, 0.1), (1, 0.1), (1, 10), (100, 10))
_OTHER_SIDE = ((-1, -0.5), (-10, -30))


class Rows(Protocol):
    """Leaves of an output and of targets."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Leaves of the output."""

    @property
    def targets(self) -> Sequence[Tensor]:
        """Leaves of the targets."""


@dataclass(frozen=True)
class LossParts:
    """Leaves of an output and of targets, split into a first and a second part.

    Attributes:
        outputs, targets: their leaves.
        first, rest: number of samples, or tokens, in each part.
        along: the dimension of the split: 0 samples, 1 tokens.
        units: rows per sample (or token), by leaf, outputs first; 0: the leaf belongs to all of them.
        is_odd: whether masks have numbers that real ones may never have.
        words: description of the variant, for messages.
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
        """Share of the first part in the samples, or tokens."""
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

    def of_all_sizes(self) -> Iterator[LossParts]:
        """Yield variants with outputs of other scales, so that thresholds of a loss lie between the parts."""
        yield self
        for first, rest in _SCALES:
            yield self.scaled(first, rest)
            if any(self._is_free(len(self.outputs) + i, t) and not is_mask(t) for i, t in enumerate(self.targets)):
                yield self.scaled(first, rest, with_targets=True)

    def on_other_side(self) -> Iterator[LossParts]:
        """Yield variants with the other sign, where a loss may have a gradient, as one with `relu`."""
        for first, rest in _OTHER_SIDE:
            yield self.scaled(first, rest)

    def with_one_far(self) -> Iterator[LossParts]:
        """Yield more samples, where memory allows it, with the first far from all others."""
        split, known = len(self.outputs), self.first + self.rest
        if sum(leaf.nbytes for leaf in self.outputs) * _MANY > _LARGE_BYTES * known:
            return
        places, scales = [number % known for number in range(_MANY)], [1 - 0.1 * (n % 4) for n in range(_MANY)]
        units = self.units[:split], self.units[split:]
        outputs = [taken(leaf, unit, places, scales) for leaf, unit in zip(self.outputs, units[0], strict=True)]
        targets = [taken(leaf, unit, places) for leaf, unit in zip(self.targets, units[1], strict=True)]
        many = replace(self, outputs=outputs, targets=targets, first=1, rest=_MANY - 1)
        for scale in _FAR:
            yield many.scaled(scale, 1)

    def with_hits(self) -> LossParts:
        """Return the variant whose first rows almost equal their targets: their loss is near 0."""
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

    def with_other_rest(self) -> Iterator[LossParts]:
        """Yield the variant with other values in output tensors of no sample, if there are any."""
        others = [
            t if unit or not t.is_floating_point() else _moved_on(t)
            for t, unit in zip(self.outputs, self.units, strict=False)
        ]
        if any(other is not t for other, t in zip(others, self.outputs, strict=True)):
            yield replace(self, outputs=others)

    def scaled(self, first: float, rest: float, *, with_targets: bool = False) -> LossParts:
        """Return the variant with outputs multiplied in each part, and, `with_targets`, float targets; masks never."""
        leaves = (*self.outputs, *self.targets) if with_targets else self.outputs
        made = [
            torch.cat([a * first, b * rest], self.along) if self._is_free(i, t) and not is_mask(t) else t
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
    outputs: Sequence[Tensor], targets: Sequence[Tensor], samples: int, *, fills: bool = False
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return large outputs and their targets cut along dimensions that both share, such as tokens.

    To `_TOKENS`, or, if it `fills` memory, to as many as leave them large.
    """
    nbytes = sum(leaf.nbytes for leaf in outputs) * _ROWS // samples
    if nbytes <= _LARGE_BYTES:
        return outputs, targets
    longest = max(leaf.shape[1] for leaf in (*outputs, *targets) if leaf.dim() > 1) if fills else 0
    most = max(_TOKENS, longest * _LARGE_BYTES // nbytes)
    sizes = {size for leaf in targets for size in leaf.shape[1:]}
    sizes |= {len(leaf) // samples for leaf in targets if leaf.dim() == 1 and len(leaf) % samples == 0}
    long = {size for leaf in outputs for size in leaf.shape[1:] if size > most and size in sizes}

    def short(leaf: Tensor) -> Tensor:
        if leaf.dim() == 1 and len(leaf) // samples in long and len(leaf) % samples == 0:
            return leaf.view(samples, -1)[:, :most].flatten()
        for dim, size in enumerate(leaf.shape[1:], 1):
            leaf = leaf.narrow(dim, 0, most) if size in long else leaf
        return leaf

    return [short(leaf) for leaf in outputs], [short(leaf) for leaf in targets]


def along_samples(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], samples: int, units: Sequence[int]
) -> LossParts:
    """Return parts of unlike numbers of samples, from the rows of the leaves, where memory allows it."""
    size = sum(leaf.nbytes for leaf in outputs) // samples
    count = _ROWS if 2 * samples >= _ROWS or _ROWS * size <= _FREE_BYTES else 2 * samples
    first = 2 if count == _ROWS else 1
    places = [number % samples for number in range(count)]
    scales = [1 - 0.1 * number for number in range(count)]
    split = len(outputs)
    return LossParts(
        [taken(leaf, unit, places, scales) for leaf, unit in zip(outputs, units[:split], strict=True)],
        [taken(leaf, unit, places) for leaf, unit in zip(targets, units[split:], strict=True)],
        first,
        count - first,
        0,
        units,
    )


def cut_elsewhere(parts: LossParts) -> LossParts:
    """Return the same samples, with one alone in the first part."""
    return replace(parts, first=1, rest=parts.first + parts.rest - 1)


def along_tokens(parts: LossParts) -> LossParts | None:
    """Return the same samples split along tokens; None where outputs and targets differ in length."""
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


def is_mask(leaf: Tensor) -> bool:
    """Return whether a leaf has only zeros and ones."""
    is_number = leaf.is_floating_point() or leaf.dtype is torch.bool
    return is_number and bool(((leaf == 0) | (leaf == 1)).all())


def leaf_rows(tree: Tree, leaves: Sequence[Tensor], samples: int, apart: Collection[str] = ()) -> list[int]:
    """Return the rows per sample of each leaf of a tree; 0: it belongs to no sample, as those in `apart`."""
    rows = [rows_of_each(leaf, samples) for leaf in leaves]
    return [0 if path in apart else n for path, n in zip(tree.paths, rows, strict=True)] if apart else rows


def rows_of_each(leaf: Tensor, samples: int) -> int:
    """Return the rows per sample of a leaf; 0: its rows are not a multiple of the samples."""
    return leaf.shape[0] // samples if leaf.dim() and leaf.shape[0] and leaf.shape[0] % samples == 0 else 0


def taken(leaf: Tensor, unit: int, places: Sequence[int], scales: Sequence[float] | None = None) -> Tensor:
    """Return the rows of some samples, scaled for outputs."""
    if not unit:
        return leaf
    rows = leaf.reshape(-1, unit, *leaf.shape[1:])[places]
    if scales is not None and leaf.is_floating_point():
        rows = _telling(rows)
        rows = rows * torch.tensor(scales, dtype=leaf.dtype, device=leaf.device).view(-1, *[1] * (rows.dim() - 1))
    return rows.flatten(0, 1)


def _telling(rows: Tensor) -> Tensor:
    """Return finite numbers in place of inf and nan; made-up ones where all are zero."""
    if rows.any():
        return rows.nan_to_num(0.5, 1.5, -1.5)
    return (torch.arange(rows.numel(), device=rows.device) % 7 + 1).div(8).to(rows.dtype).view_as(rows)


def ratio_of(
    pairs: Sequence[tuple[Tensor, Tensor | None]], tolerance: float, least: float, usual: float
) -> float | str:
    """Return the factor from a part's gradients alone to those in the whole; "none": all are 0; "unlike": none fits.

    Every row has to fit, within its own tolerance and the least difference that can be seen in gradients of `usual`
    size: gradients of large outputs may be rounding errors only.
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
