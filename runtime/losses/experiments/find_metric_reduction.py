"""Examination of a metric: its reduction, a sum or a mean, by experiment on its values alone.

    M(o) = M(a) + M(b)                a sum, which is the default for a metric
    M(o) = w_a M(a) + w_b M(b)        a mean, by weights that are known (`loss_reductions`)

Where classes are predicted, some predictions are made correct, since a metric of zero decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..loss_reductions import LossWeight, Over, WeightFinding
from .altered_targets import with_other_targets
from .find_loss_reduction import WRITES, Candidates, LossExamination, Tried
from .loss_parts import LossParts
from .losses_mixing_tokens import OF_SLICES, mixes_values
from .trial_call_modes import CallsChecked

_NEAR = 2e-3


class MetricExamination(LossExamination):
    """Experiments on the values of a metric; one that is always zero counts as a sum."""

    called = "the metric"

    def examine_loss(self) -> WeightFinding:
        """Return the finding that all values agree on."""
        parts = self.usable()
        if parts is None or not any(parts.units):
            return WeightFinding(LossWeight(Over.SUM))
        if name := self.depends_on_calls(parts):
            return WeightFinding(None, WRITES.format(name))
        candidates = dict(self.candidates(parts))
        is_sum, is_told = True, False
        for tried in self._tried(parts):
            values = self._values(tried)
            if values is None or not any(values):
                continue
            whole, a, b = values
            least, is_told = _NEAR * max(map(abs, values)), True
            is_sum = is_sum and abs(whole - a - b) <= least
            candidates = _fitting(candidates, tried, values, least)
            if not is_sum and not candidates:
                return WeightFinding(None, "it is neither a sum nor a mean over samples, tokens or targets")
        if self.is_sliced and mixes_values(self):
            return WeightFinding(None, OF_SLICES)
        return WeightFinding(LossWeight(Over.SUM) if is_sum or not is_told else self.chosen(candidates))

    def _tried(self, parts: LossParts) -> Iterator[LossParts]:
        others = with_other_targets(parts, self.ids, is_safe=self.is_safe, tables=self._tables)
        for some in (*parts.of_all_sizes(), *parts.with_one_far(), *others):
            yield some
            yield some.with_hits()
        yield from parts.with_other_rest()

    def _values(self, parts: LossParts) -> tuple[float, float, float] | None:
        one, other = parts.halves()
        whole, a, b = (self.try_once(*some) for some in ((parts.outputs, parts.targets), one, other))
        return None if whole is None or a is None or b is None else (float(whole.value), float(a.value), float(b.value))

    def try_once(
        self, outputs: Sequence[Tensor], targets: Sequence[Tensor], *, may_be_infinite: bool = False
    ) -> Tried | None:
        """Return the result of the metric on these leaves; None where it is not finite, or the call fails."""
        try:
            with torch.no_grad(), CallsChecked() as checked:
                found = self.call(outputs, targets)
                value, weight = found if isinstance(found, tuple) else (found, None)
                value = torch.as_tensor(value).double()
        except Exception:  # errors of user code on batches that it never gets
            return None
        finally:
            self.kept.put_back()
        by = None if weight is None else float(weight)
        is_finite = may_be_infinite or bool(value.isfinite())
        return Tried(value, [None] * len(outputs), by, checked.dtype) if is_finite and not value.dim() else None


class StatedMetricExamination(MetricExamination):
    """Experiments on a metric that returns (sum, weight), whose quotient is reported."""

    def examine_loss(self) -> WeightFinding:
        """Return that its reduction is stated, or the reason why its weight is wrong."""
        stated, parts = LossWeight(Over.STATED), self.usable()
        if parts is None or not any(parts.units):
            return WeightFinding(stated)
        if name := self.depends_on_calls(parts):
            return WeightFinding(None, WRITES.format(name))
        for some in self._tried(parts):
            halves = some.halves()
            tried = [self.try_once(*given) for given in ((some.outputs, some.targets), *halves)]
            known = [(float(one.value), float(one.weight or 0)) for one in tried if one is not None]
            if len(known) < len(tried):
                continue  # not finite, which decides nothing
            whole, *each = known
            total, weight = map(sum, zip(*each, strict=True))
            if weight and whole[1] and abs(whole[0] / whole[1] - total / weight) > _NEAR * abs(whole[0] / whole[1]):
                return WeightFinding(None, "of two batches together it is not the sums of both by their weights")
        return WeightFinding(None, OF_SLICES) if self.is_sliced and mixes_values(self) else WeightFinding(stated)


def _fitting(candidates: Candidates, parts: LossParts, values: Sequence[float], least: float) -> Candidates:
    """Return the weights by which the whole is the mean of the parts."""
    whole, a, b = values
    found = Candidates()
    for weight, of in candidates.items():
        share = of(parts)
        if share is not None and abs(whole - share * a - (1 - share) * b) <= least:
            found[weight] = of
    return found
