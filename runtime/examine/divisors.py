"""By what a loss was divided at its end, as its graph has it.

(losses * mask).sum() / mask.sum()     DivBackward0       the number it was divided by
cross_entropy(…)                       NllLossBackward0   what its targets weigh
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def divisor_of(loss: Tensor) -> Tensor | None:
    """Return the number that a loss was divided by at the end, as its graph has it; None where it was not so."""
    node: Any = loss.grad_fn
    if node is None:
        return None
    weight = getattr(node, "_saved_total_weight", None)
    if weight is not None and getattr(node, "_saved_reduction", None) == 1:  # what autograd calls a mean
        return weight if weight.dim() == 0 else None
    inputs = [function for function, _ in node.next_functions]
    if node.name() != "DivBackward0" or inputs[0] is None or any(function is not None for function in inputs[1:]):
        return None
    divisor = node._saved_other
    return divisor if isinstance(divisor, Tensor) and divisor.dim() == 0 else None
