"""By what a loss was divided at its end, as its graph has it.

    (losses * mask).sum() / mask.sum()     DivBackward0       the number it was divided by
    cross_entropy(…)                       NllLossBackward0   what its targets weigh
    losses[mask].mean(), mse_loss(…)       MeanBackward0      how many they are, which is no tensor

times a factor, or with something added, that has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MEAN = 1
"""What autograd calls the reduction to a mean."""
_HANDED_ON = ("Neg", "Mul", "Add", "Sub", "ToCopy", "Squeeze", "View", "Reshape", "Clone", "Alias")


def counts(divisor: Tensor | int | None, samples: int) -> bool:
    """Whether a divisor is found from data, or is how many samples there are: a number of Python's may be any other."""
    if not isinstance(divisor, Tensor):
        return False
    short = torch.float16 if divisor.dtype.is_floating_point else torch.int8
    is_of_python = torch.result_type(torch.zeros((), dtype=short, device=divisor.device), divisor) != divisor.dtype
    return not is_of_python or divisor.item() == samples


def divisor_of(loss: Tensor) -> Tensor | int | None:
    """Return the number that a loss was divided by at the end, as its graph has it; None where it was not so."""
    node: Any = loss.grad_fn
    while node is not None:
        inputs = [function for function, _ in node.next_functions if function is not None]
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name == "Div" and len(inputs) == 1 and node.next_functions[0][0] is inputs[0]:
            divisor = node._saved_other
            return divisor if isinstance(divisor, Tensor) and divisor.dim() == 0 else None
        if getattr(node, "_saved_reduction", None) == _MEAN:
            weight = getattr(node, "_saved_total_weight", None)
            if weight is None:
                return int(node._saved_self.numel()) if hasattr(node, "_saved_self") else None
            return weight if weight.dim() == 0 else None
        if name == "Mean":
            return int(node._saved_self_sym_numel)
        node = inputs[0] if name in _HANDED_ON and len(inputs) == 1 else None
    return None
