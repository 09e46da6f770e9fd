"""Checks of a loss's reduction on a step's own microbatches.

    step 0, 1, 2, 4, 8, …, and steps before which state that the loss reads has changed

    a few samples of each microbatch, or all     L(all) = Σ wᵢ L(i) / Σ wᵢ     ∂L(all)/∂i = wᵢ / Σ wᵢ ∂L(i)/∂i    a mean
    repeated once per replica                    L(all) = Σ L(i)               ∂L(all)/∂i = ∂L(i)/∂i               a sum

At most a few megabytes are kept, or a sample of two microbatches. Samples that the loss cannot be called on decide
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.trees import DIFFERENTIABLE, Tree, flatten
from .experiments.find_loss_reduction import LossExamination, Tried
from .experiments.loss_parts import leaf_rows, rows_of_each, shortened
from .loss_reductions import LossWeight, Over

_FREE_BYTES = 8 << 20
OF_REST = (
    "it goes by output{}, which belongs to no sample and is another in each microbatch; give it for each sample, or "
    'say that it is a mean over them, loss_over="samples", or a sum, "sum"'
)
OF_REST_ALONE = (
    "it is a sum of output{} alone, which belongs to no sample and is the same in each microbatch, over a weight of "
    "samples; take it as often as there are samples"
)
ALONE = "alone "
_ROUNDING = 10
"""Factor on the tolerance of experiments on a few samples."""


class SampleUnit(NamedTuple):
    """Some samples of a microbatch."""

    output: Tree
    target: Tree
    outputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    samples: int
    rows: Sequence[int]
    """Rows per sample, by leaf."""

    def built(self) -> tuple[Any, Any]:
        """Return output and targets as trees."""
        return self.output.build(self.outputs), self.target.build(self.targets)

    def cut(self, first: int, count: int) -> SampleUnit:
        """Return `count` of the samples, from `first` on."""
        cut = [
            leaf.narrow(0, first * unit, count * unit) if unit else leaf
            for leaf, unit in zip((*self.outputs, *self.targets), self.rows, strict=True)
        ]
        split = len(self.outputs)
        return self._replace(outputs=cut[:split], targets=cut[split:], samples=count)

    def fits(self, other: SampleUnit) -> bool:
        """Return whether its structure, shapes per sample and dtypes equal those of another."""

        def shapes(unit: SampleUnit) -> list[object]:
            return [(leaf.shape[1:], leaf.dtype, bool(n)) for leaf, n in zip(unit.leaves, unit.rows, strict=True)]

        if self is other:
            return True
        is_built_alike = self.output is other.output or self.output.is_built_as(other.output)
        return is_built_alike and self.target == other.target and shapes(self) == shapes(other)

    def shares_rest_with(self, other: SampleUnit) -> bool:
        """Return whether its tensors of no sample equal those of another."""
        alike = zip(self.rows, self.leaves, other.leaves, strict=True)
        return all(self.rows) or all(rows or one is its or torch.equal(one, its) for rows, one, its in alike)

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return self.leaves[0].device

    @property
    def leaves(self) -> Sequence[Tensor]:
        """Leaves of the output, then of the targets."""
        return (*self.outputs, *self.targets)

    @property
    def of_rest(self) -> list[int]:
        """Indices of its output's leaves that belong to no sample."""
        return [n for n, leaf in enumerate(self.outputs) if not self.rows[n] and leaf.numel()]

    def with_leaves(self, others: Mapping[int, Tensor]) -> SampleUnit:
        """Return it with other leaves of its output, by index."""
        return self._replace(outputs=[others.get(number, leaf) for number, leaf in enumerate(self.outputs)])

    def copied(self) -> SampleUnit:
        """Return it with tensors of its own."""
        outputs, targets = ([t.clone() for t in leaves] for leaves in (self.outputs, self.targets))
        return self._replace(outputs=outputs, targets=targets)

    def moved(self, place: torch.device, dtype: torch.dtype | None) -> SampleUnit:
        """Return it on another device, floating-point tensors in another dtype."""
        outputs, targets = (
            [t.to(place, dtype if t.is_floating_point() else None) for t in leaves]
            for leaves in (self.outputs, self.targets)
        )
        return self._replace(outputs=outputs, targets=targets)


class JoinedCall(NamedTuple):
    """Dtype in which a loss could be called on joined samples, and the tolerance of that."""

    dtype: torch.dtype | None
    tolerance: float


class BatchComparison(NamedTuple):
    """Result of a comparison.

    Attributes:
        why: the reason why a loss of joined samples contradicts its reduction; "": it agrees, or nothing is decided.
        of_each: elements per sample, where it is a mean over samples; None: not known.
        way: how it was called; None: every call failed.
    """

    why: str = ""
    of_each: float | None = None
    way: JoinedCall | None = None


class RealBatch:
    """Samples of a step's microbatches.

    Args:
        units: number of units of a step on this rank.
        copies: number of replicas.
        free: limit in bytes for all samples that are kept, over all replicas.
        beside: samples of an earlier step, if any: tensors equal in all of these may differ between ranks.
        before: samples of an earlier call of the same step.
    """

    def __init__(
        self,
        units: int,
        copies: int = 1,
        free: int = _FREE_BYTES,
        beside: SampleUnit | None = None,
        before: SampleUnit | None = None,
    ) -> None:
        self._units = [] if before is None else [before]
        self._beside = [] if beside is None or beside is before else [beside]
        self._latest: Any = None
        self._copies = copies
        self._is_short = False
        self._free = free // max(1, units * copies)

    def keep(self, output: Any, targets: Any, samples: int, apart: Collection[str] = ()) -> None:
        """Keep some samples of a microbatch; `apart`: paths of its output's tensors that belong to no sample."""
        tree, outputs = flatten(output)
        target_tree, given = flatten(targets)
        if output is self._latest or not any(rows_of_each(t, samples) and t.dtype in DIFFERENTIABLE for t in outputs):
            return
        self._latest, leaves = output, [t.detach() for t in outputs]
        if sum(leaf.nbytes for leaf in leaves) > self._free * samples:
            self._is_short = True
            leaves, given = map(list, shortened(leaves, given, samples))  # type: ignore[assignment]
        count = min(samples, self._free * samples // max(1, sum(leaf.nbytes for leaf in leaves)))
        if count or len(self._units) < 2:
            rows = leaf_rows(tree, leaves, samples, apart) + leaf_rows(target_tree, given, samples)
            unit = SampleUnit(tree, target_tree, leaves, given, samples, rows)
            unit = unit if count == samples else unit.cut(0, max(1, count))
            self._units.append(unit._replace(outputs=[leaf.clone() for leaf in unit.outputs]))

    @property
    def device(self) -> torch.device:
        """Device of its samples."""
        return self._units[0].device if self._units else torch.device("cpu")

    @property
    def probe(self) -> SampleUnit | None:
        """A few samples, in memory of their own, or None."""
        return self._units[0].cut(0, min(2, self._units[0].samples)).copied() if self._units else None

    def misfit(
        self,
        kind: type[LossExamination],
        loss: Callable[[Any, Any], Any],
        rule: LossWeight,
        tables: Sequence[Tensor],
    ) -> BatchComparison:
        """Compare a loss of all samples joined with the combination of losses by its reduction."""
        units, first = self._alike()
        if not units:
            return BatchComparison()
        if first < units[0].samples:
            units[:1] = [units[0].cut(0, first), units[0].cut(first, units[0].samples - first)]
        whole = _joined(units * self._copies)
        of = kind(loss, *whole.built(), whole.samples)
        for place, dtype in of.ways():
            moved = whole.moved(place, dtype)
            together = of.try_once(moved.outputs, moved.targets)
            if together is None:
                continue
            if _is_of_rest(together, whole.rows):
                break
            parts = [unit.moved(place, dtype) for unit in units]
            tried = [of.try_once(part.outputs, part.targets, may_be_infinite=True) for part in parts]
            each = [one for one in tried if one is not None]
            if len(each) < len(tried):
                break
            tolerance = _ROUNDING * of.tolerance(together)
            why = _misfit(rule, tables, parts, each, together, self._copies, tolerance) or of.why_unlinear(rule)
            return BatchComparison(why, self._numbers_of_each(rule, parts[0], together), JoinedCall(dtype, tolerance))
        return BatchComparison()

    def rests(self, kind: type[LossExamination], loss: Callable[[Any, Any], Any]) -> dict[str, list[str]]:
        """Return digests of the output tensors of no sample in each microbatch, by path, if a loss reads them.

        A sum of these alone, over a weight of samples, has the prefix `ALONE`; over a weight of theirs it is trusted.
        """
        if not self._units or not self._units[0].of_rest:
            return {}
        unit = self._units[0]
        units = [some for some in self._units if len(some.outputs) == len(unit.outputs)]
        of = kind(loss, *unit.built(), unit.samples)
        for place, dtype in of.ways():
            moved = unit.moved(place, dtype)
            if (one := of.try_once(moved.outputs, moved.targets)) is None:
                continue
            halved = {n: t * 0.5 for n, t in enumerate(moved.outputs) if moved.rows[n] and t.is_floating_point()}
            is_alone = one.weight is not None and not _differs(of, one, moved, halved)
            twice = of.try_once(*_joined([moved, moved])[2:4]) if is_alone else None
            if is_alone and (twice is None or twice.weight == one.weight or not one.value):
                break
            used = [n for n in moved.of_rest if _differs(of, one, moved, {n: _other(moved.outputs[n])})]
            mark = ALONE if is_alone else ""
            rows = [" ".join(_told(t) for n, t in enumerate(u.outputs) if u.rows[n]) if is_alone else "" for u in units]
            told = {n: {f"{_told(u.outputs[n])}|{its}" for u, its in zip(units, rows, strict=True)} for n in used}
            return {mark + unit.output.paths[n]: sorted(some) for n, some in told.items()}
        return {}

    def swapped(self) -> tuple[SampleUnit, SampleUnit] | None:
        """Return a unit, and the same with another unit's tensors of no sample; None: there are none."""
        one = self._units[0] if self._units else None
        other = next((some for some in self._units[1:] if one is not None and one.fits(some)), None)
        if one is None or other is None or not one.of_rest:
            return None
        return one, one.with_leaves({number: other.outputs[number] for number in one.of_rest})

    def _alike(self) -> tuple[list[SampleUnit], int]:
        """Return units that can be joined, and an earlier one, and the samples of the first part: of one alone, half.

        No units, where there are no two parts.
        """
        units = [unit for unit in self._units if unit.fits(self._units[0])]
        first = units[0].samples if units else 0
        if len(units) == 1 and first > 1:
            first //= 2
        units += [unit for unit in self._beside if units and unit.fits(units[0]) and units[0].shares_rest_with(unit)]
        has_two = sum(unit.samples for unit in units) > first and all(map(units[0].shares_rest_with, units))
        return (units if has_two else []), first

    def two_parts(self, dtype: torch.dtype | None) -> tuple[SampleUnit, SampleUnit, SampleUnit] | None:
        """Return some samples, the others, and all of them: views of the same numbers, in a dtype."""
        units, first = self._alike()
        if not units:
            return None
        whole = _joined(units).moved(self.device, dtype)
        return whole.cut(0, first), whole.cut(first, whole.samples - first), whole

    def _numbers_of_each(self, rule: LossWeight, part: SampleUnit, whole: Tried) -> float | None:
        """Return the elements per sample that its mean may be over; ranks compare them.

        A mean over all elements equals the mean of the samples' means only if all have as many.
        """
        is_mean = rule.over is Over.TOKENS or (rule.over is Over.SAMPLES and rule.by_slices)
        if not is_mean or self._is_short:
            return None
        used = zip(part.outputs, part.rows, whole.gradients, strict=False)
        return float(sum(leaf[:rows].numel() for leaf, rows, gradient in used if rows and gradient is not None))


def _misfit(
    rule: LossWeight,
    tables: Sequence[Tensor],
    parts: Sequence[SampleUnit],
    each: Sequence[Tried],
    whole: Tried,
    copies: int,
    tolerance: float,
) -> str:
    """Return how the joined parts contradict the reduction, in words; "": they do not."""
    weights = [_weight_of(rule, tables, part, one) for part, one in zip(parts, each, strict=True)]
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights):
        return "it was not divided by a number at its end"
    total = 1.0 if rule.over is Over.SUM else sum(known) * copies
    if not total:
        return ""
    if rule.over is Over.STATED:
        by = float(whole.weight or 0)
        if not by:
            return "of all together it weighs nothing"
        known = [1.0] * len(known)
        gradients = [None if gradient is None else gradient / by for gradient in whole.gradients]
        whole = whole._replace(value=whole.value / by, gradients=gradients)
    shares = [weight / total for weight in known]
    values = [share * float(one.value) if share else 0.0 for share, one in zip(shares, each, strict=True)]
    value = float(whole.value)
    if not math.isfinite(value) and not math.isfinite(sum(values)):
        return ""  # the step itself reports it
    if not abs(value - copies * sum(values)) <= 4 * tolerance * (copies * sum(map(abs, values)) + abs(value) + 1e-9):
        return f"of all together it is {value:.6g}, and {copies * sum(values):.6g} would be right"
    pairs, first = list[tuple[Tensor, Tensor]](), 0
    for part, share, one in zip(parts, shares, each, strict=True):
        mine = [
            (gradient.narrow(0, first * unit, part.samples * unit), alone)
            for gradient, alone, unit in zip(whole.gradients, one.gradients, part.rows, strict=False)
            if gradient is not None and unit
        ]
        together = [gradient.flatten().double() for gradient, _ in mine]
        alone = [
            torch.zeros_like(to) if its is None or not share else share * its.flatten().double()
            for to, (_, its) in zip(together, mine, strict=True)
        ]
        if together:
            pairs.append((torch.cat(together), torch.cat(alone)))
        first += part.samples
    size = max((float(joint.norm()) for joint, _ in pairs), default=0.0)
    for joint, single in pairs:
        if not float((joint - single).norm()) <= tolerance * max(float(joint.norm()), 1e-3 * size) + 1e-12:
            return "of all together it has another gradient"
    return ""


def why_rests_misfit(rests: Sequence[Mapping[str, Sequence[str]]], *, are_all: bool = False) -> str:
    """Return the reason why a loss may not read these output tensors of no sample; `are_all`: of all ranks; "": it may.

    A sum of them alone is trusted to be of a microbatch's samples, if it differs where these do.
    """
    found = {path: {told for row in rests for told in row.get(path, [])} for row in rests for path in row}
    for path, told in sorted(found.items()):
        are_alike = len({of_rest for of_rest, _, _ in (one.partition("|") for one in told)}) == 1
        if not path.startswith(ALONE) and not are_alike:
            return OF_REST.format(path)
        if path.startswith(ALONE) and are_all and are_alike and len(told) > 1:
            return OF_REST_ALONE.format(path.removeprefix(ALONE))
    return ""


def _other(rest: Tensor) -> Tensor:
    return rest.logical_not() if rest.dtype is torch.bool else rest + 1


def _told(rest: Tensor) -> str:
    return f"{float(rest.double().sum()):.9g} {float(rest.double().norm()):.9g}"


def _differs(of: LossExamination, one: Tried, unit: SampleUnit, others: Mapping[int, Tensor]) -> bool:
    """Return whether a loss changes with some leaves of the output; False where the call fails."""
    other = of.try_once(unit.with_leaves(others).outputs, unit.targets)
    return other is not None and (not torch.equal(one.value, other.value) or one.weight != other.weight)


def _is_of_rest(tried: Tried, rows: Sequence[int]) -> bool:
    """Return whether a loss has gradients of tensors of no sample alone, as one that a block has computed."""
    moved = [bool(unit) for gradient, unit in zip(tried.gradients, rows, strict=False) if gradient is not None]
    return bool(moved) and not any(moved)


def _weight_of(rule: LossWeight, tables: Sequence[Tensor], part: SampleUnit, tried: Tried) -> float | None:
    """Return the weight of a part; None: it is not known."""
    if rule.over is Over.SUM:
        return 1.0
    if rule.over in (Over.SAMPLES, Over.MICROBATCH, Over.TOKENS):
        return float(part.samples)  # all of one length
    if rule.over is Over.STATED:
        return float(tried.weight or 0)
    return float(rule.of_targets(dict(zip(part.target.paths, part.targets, strict=True)), tables))


def _joined(units: Sequence[SampleUnit]) -> SampleUnit:
    """Return the samples of several units joined."""
    first = units[0]
    joined = [
        torch.cat(leaves) if unit else leaves[0]
        for unit, *leaves in zip(first.rows, *(unit.leaves for unit in units), strict=True)
    ]
    split = len(first.outputs)
    return first._replace(outputs=joined[:split], targets=joined[split:], samples=sum(unit.samples for unit in units))
