"""Checks of the reductions of user losses in every step, by values alone.

    a few samples of one microbatch, and of the others of this rank     L(all) = Σ wᵢ L(i) / Σ wᵢ     three calls

No device synchronization: the result is piggybacked on the figures of the step. On the CPU it is of Python numbers:
an operation on a tensor takes longer than all arithmetic. Losses of torch are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..user_objects.object_contents import HOOKS
from .loss_reductions import LossWeight, Over, named
from .recheck_reduction_on_batches import JoinedCall, RealBatch, SampleUnit
from .save_and_restore_loss_state import class_weights

Number = Any
"""A Python number, or on a device a 0-dimensional tensor."""
ValueOfSome = tuple[Number, Number]
"""A function's value of some samples, and its weight."""

_KNOWN = ("torch.nn.functional", "torch.nn.modules.loss", "transformers.loss.")


class Late(NamedTuple):
    """Result of a comparison by values, whether it fails, the value, and the right value."""

    is_off: Number
    value: Number
    right: Number

    def or_before(self, before: Late | None) -> Late:
        """Return the result that fails, of this and of an earlier batch of the same step."""
        if before is None:
            return self
        if not isinstance(self.is_off, Tensor):
            return self if self.is_off else before
        value, right = (
            torch.where(self.is_off, self.value, before.value),
            torch.where(self.is_off, self.right, before.right),
        )
        return Late(self.is_off | before.is_off, value, right)


def is_known(function: Any) -> bool:
    """Return whether a loss is torch's or transformers' own, without class weights or hooks, so that it stays as found.

    A loss bound to ranks, as for cut logits, counts too: each call of it would be collective.
    """
    tables = class_weights(function)
    while isinstance(function, partial):
        if "vocabulary" in function.keywords:
            return True
        function = function.func
    of = function if isinstance(function, FunctionType) else type(function)
    is_hooked = any(getattr(function, name, None) for name in HOOKS)
    return not (tables or is_hooked) and str(of.__module__).startswith(_KNOWN)


@torch.no_grad()
def compare_values(
    function: Callable[[Any, Any], Any], rule: LossWeight, tables: Sequence[Tensor], batch: RealBatch, way: JoinedCall
) -> Late | None:
    """Compare a function's value of joined samples with its reduction; None: the call fails, or nothing has weight."""
    if rule.over is Over.MICROBATCH:
        return None
    call = partial(_called, function, rule, tables)
    try:
        if (parts := batch.two_parts(way.dtype)) is not None:
            return _compare(rule, _called_apart(call, parts, partial(batch.two_parts, way.dtype)), way.tolerance)
        if (swapped := batch.swapped()) is None:
            return None
        found = [call(unit.moved(unit.device, way.dtype)) for unit in swapped]
        now, before = (value / weight if rule.over is Over.STATED else value for value, weight in found)
        return Late(abs(now - before) > way.tolerance * (abs(now) + abs(before) + 1e-9), before, now)
    except Exception:  # errors of user code on batches that it never gets
        return None


def _called_apart(
    call: Callable[[SampleUnit], ValueOfSome],
    parts: Sequence[SampleUnit],
    remake: Callable[[], Sequence[SampleUnit] | None],
) -> list[ValueOfSome]:
    """Call on units that share memory; on copies, where a call writes to it, or that cannot be seen."""
    leaves = parts[-1].leaves
    if not any(leaf.is_inference() for leaf in leaves):
        before = [leaf._version for leaf in leaves]
        found = list(map(call, parts))
        if before == [leaf._version for leaf in leaves]:
            return found
    return [call(unit.copied()) for unit in remake() or ()]


def _compare(rule: LossWeight, found: Sequence[ValueOfSome], tolerance: float) -> Late | None:
    """Compare the value of all samples with that of two parts, of (value, weight) of each and of all."""
    one, other, (value, weight) = found
    total = one[1] + other[1]
    if not isinstance(total, Tensor) and (not total or not weight) and rule.over is not Over.SUM:
        return None
    if rule.over is Over.SUM:
        a, b = one[0], other[0]
    elif rule.over is Over.STATED:  # a weight of 0 may have a nonzero sum
        a, b, value = one[0] / total, other[0] / total, value / weight
    else:
        a, b = (_share(its, part, total) for its, part in (one, other))
    right = a + b
    least = 4 * tolerance * (abs(a) + abs(b) + abs(value) + 1e-9)
    is_off = ((abs(value - right) <= least) ^ True) & (abs(value) < math.inf)
    return Late(is_off if rule.over is Over.SUM else is_off & (total != 0), value, right)


def _share(value: Number, weight: Number, total: Number) -> Number:
    """Return a part's share of the mean; 0 where it weighs nothing, whatever its value."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, value * weight / total)
    return value * weight / total if weight else 0.0


def _called(
    function: Callable[[Any, Any], Any], rule: LossWeight, tables: Sequence[Tensor], unit: SampleUnit
) -> ValueOfSome:
    """Return a function's value of a unit, as a mean or a sum by its reduction, and its weight.

    Raises `ValueError` where it returns neither. Gradients are switched off.
    """
    output, targets = unit.built()
    found = function(output, targets)
    is_pair = isinstance(found, tuple)
    value, its = found if is_pair else (found, unit.samples)
    value = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if is_pair != (rule.over is Over.STATED) or value.dim() or value.is_complex():
        raise ValueError("neither a number nor (sum, weight)")
    if isinstance(its, Tensor) and its.dim():
        raise ValueError("its weight is not a number")
    if not is_pair and rule.over not in (Over.SUM, Over.SAMPLES, Over.TOKENS):
        its = rule.of_targets(named(targets), tables)
    if value.device.type != "cpu":
        return value.detach().double(), torch.as_tensor(its, dtype=torch.float64, device=value.device)
    return float(value), float(its)
