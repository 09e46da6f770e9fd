"""Checks of the reductions of user losses in every step, by values alone.

    a few samples of one microbatch, and of the others of this rank     L(all) = Σ wᵢ L(i) / Σ wᵢ     three calls

No device synchronization: the result is piggybacked on the figures of the step. Losses of torch are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..objects.spaces import HOOKS
from .function_state import class_weights
from .loss_reductions import LossWeight, Over, named
from .real_batches import JoinedCall, RealBatch, SampleUnit

_KNOWN = ("torch.nn.functional", "torch.nn.modules.loss", "transformers.loss.")


class Late(NamedTuple):
    """Result of a comparison by values, as 0-dimensional tensors: whether it fails, the value, and the right value."""

    is_off: Tensor
    value: Tensor
    right: Tensor

    def or_before(self, before: Late | None) -> Late:
        """Return the result that fails, of this and of an earlier batch of the same step."""
        if before is None:
            return self
        value = torch.where(self.is_off, self.value, before.value)
        return Late(self.is_off | before.is_off, value, torch.where(self.is_off, self.right, before.right))


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


def compare_values(
    function: Callable[[Any, Any], Any], rule: LossWeight, tables: Sequence[Tensor], batch: RealBatch, way: JoinedCall
) -> Late | None:
    """Compare a function's value of joined samples with its reduction; None: the call fails."""
    parts, swapped = batch.two_parts(), batch.swapped()
    if rule.over is Over.MICROBATCH:
        return None
    try:
        if parts is None and swapped is not None:
            found = [_called(function, rule, tables, unit.moved(unit.device, way.dtype)) for unit in swapped]
            now, before = (value / weight if rule.over is Over.STATED else value for value, weight in found)
            return Late((now - before).abs() > way.tolerance * (now.abs() + before.abs() + 1e-9), before, now)
        if parts is None:
            return None
        one, other, whole = (_called(function, rule, tables, unit.moved(unit.device, way.dtype)) for unit in parts)
    except Exception:  # errors of user code on batches that it never gets
        return None
    is_something: Tensor | bool = True
    if rule.over is Over.SUM:
        a, b = one[0], other[0]
    elif rule.over is Over.STATED:  # a weight of 0 may have a nonzero sum
        total = torch.as_tensor(one[1] + other[1], dtype=one[0].dtype, device=one[0].device)
        a, b, is_something = one[0] / total, other[0] / total, total != 0
        whole = whole[0] / whole[1], whole[1]
    elif isinstance(one[1], int) and isinstance(other[1], int):
        a, b = (value * (count / whole[1]) for value, count in (one, other))
    else:
        first, second = (
            torch.as_tensor(weight, dtype=value.dtype, device=value.device) for value, weight in (one, other)
        )
        total = first + second
        a, b = (
            torch.where(w == 0, 0.0, v * w / total) for w, (v, _) in zip((first, second), (one, other), strict=True)
        )
        is_something = total != 0
    right, value = a + b, whole[0]
    least = 4 * way.tolerance * (a.abs() + b.abs() + value.abs() + 1e-9)
    is_off = ((value - right).abs() <= least).logical_not() & value.isfinite()
    return Late(is_off & is_something, value, right)


def _called(
    function: Callable[[Any, Any], Any], rule: LossWeight, tables: Sequence[Tensor], unit: SampleUnit
) -> tuple[Tensor, Tensor | float]:
    """Return a function's value of a unit, as a mean or a sum by its reduction, and its weight.

    Raises `ValueError` where it returns neither.
    """
    output, targets = unit.built()
    with torch.no_grad():
        found = function(output, targets)
    is_pair = isinstance(found, tuple)
    value, weight = map(torch.as_tensor, found if is_pair else (found, 0))
    if is_pair != (rule.over is Over.STATED) or value.dim() or value.is_complex() or weight.dim():
        raise ValueError("neither a number nor (sum, weight)")
    value = value.detach().double()
    if is_pair:
        return value, found[1]
    if rule.over in (Over.SUM, Over.SAMPLES, Over.TOKENS):
        return value, unit.samples
    return value, rule.of_targets(named(targets), tables)
