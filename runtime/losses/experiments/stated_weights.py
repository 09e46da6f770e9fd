"""Examination of a loss that returns (sum, weight): whether these are a sum and its weight, by experiment.

    L(o) = L(a) + L(b), ∂L(o)/∂a = ∂L(a)/∂a        holds for a sum, not for a mean
    w(o) = w(a) + w(b)                             holds for the weight of a sum, not for a constant

Where sequences are cut into equal slices it has to hold along tokens as well; a sum of per-sample means over tokens,
with the same weight for each slice, is accepted too. A loss that cannot be called on a few samples is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..loss_reductions import LossWeight, Over, WeightFinding
from .altered_targets import with_ignored_tokens, with_other_targets
from .find_loss_reduction import WRITES, LossExamination, Tried
from .loss_parts import LossParts, along_tokens, cut_elsewhere
from .losses_mixing_tokens import OF_SLICES, mixes_tokens


class StatedExamination(LossExamination):
    """Experiments on a loss that returns (sum, weight); `weights` are those of its calls."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.weights: list[float] = []

    def examine_loss(self) -> WeightFinding:
        """Return that its reduction is stated, or the first experiment that fails."""
        doubt = self._doubt() or self.why_unlinear(LossWeight(Over.STATED))
        return WeightFinding(None if doubt else LossWeight(Over.STATED), doubt)

    def _doubt(self) -> str:
        parts = self.usable() if self.has_rows() else None
        if parts is None:
            return ""
        if name := self.depends_on_calls(parts):
            return WRITES.format(name)
        others = with_other_targets(parts, self.ids, is_safe=self.is_safe, tables=self._tables)
        made = (parts.with_hits(), cut_elsewhere(parts), *parts.with_other_rest())
        for some in (*parts.of_all_sizes(), *parts.with_one_far(), *made, *others):
            if doubt := self._doubt_of(some):
                return f"of two batches together {doubt}{some.words}"
        cut = along_tokens(parts) if self.is_sliced else None
        for some in with_ignored_tokens(cut, self.ids, is_safe=self.is_safe) if cut is not None else ():
            if doubt := self._doubt_of(some):
                return f"sequences are cut into slices here, and of two of these together {doubt}"
        return OF_SLICES if self.is_sliced and mixes_tokens(self) else ""

    def _doubt_of(self, parts: LossParts) -> str:
        self.weights.clear()
        share = self.share(parts)
        if not share.is_told and not share.why:
            return ""
        if share.why:
            return f"the first thing is not the sum of what it is of each{self._of_rest}"
        whole, a, b = self.weights
        if share.first is not None and not any(share.is_empty):
            is_mean_of_each = parts.along and whole == a == b and abs(share.first - parts.share) < share.tolerance
            return "" if is_mean_of_each else "the first thing is a mean of what it is of each, and not the sum"
        if abs(whole - a - b) > 1e-4 * (abs(whole) + abs(a) + abs(b)):
            return f"the weight is {whole:g}, and of each {a:g} and {b:g}"
        return ""

    def call(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the sum, and store the weight."""
        total, weight = super().call(outputs, targets)
        self.weights.append(float(weight))
        return torch.as_tensor(total)

    def try_once(
        self, outputs: Sequence[Tensor], targets: Sequence[Tensor], *, may_be_infinite: bool = False
    ) -> Tried | None:
        """Return the result of the loss on these leaves, with the weight it returned."""
        tried = super().try_once(outputs, targets, may_be_infinite=may_be_infinite)
        return None if tried is None else tried._replace(weight=self.weights[-1])
