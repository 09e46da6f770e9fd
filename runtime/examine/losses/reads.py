"""What a user's loss reads while it is tried: numbers, into Python; memory that is not there, which is refused.

(losses * mask).sum() / mask.sum()       tensors alone: it does the same to all data
if mask.any(): …    max(n.item(), 1)     goes by data in Python, and may go another way for other data
losses[mask].mean()                      how many there are is known to Python, so it may
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_ASKING = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__"}) | {
    *(
        "equal",
        "allclose",
        "is_nonzero",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "__array__",
    ),
    *("__contains__", "bincount", "repeat_interleave"),
}
"""Functions whose results tell Python of numbers: these themselves, or how many there are of something."""


class ReadsChecked(TorchFunctionMode):
    """While it is entered, what torch does not check itself before it reads memory is refused.

    Attributes:
        has_read: whether Python was told of numbers.
        has_divided: whether something was divided by a tensor of no dimensions, such as a count.
        dtype: the shortest type of floating numbers that a gradient goes through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_read, self.has_divided, self.dtype = False, False, torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.has_read |= name in _ASKING or (name == "__getitem__" and _is_masked(args[1]))
        by = args[1] if "div" in name and len(args) > 1 else None
        self.has_divided |= isinstance(by, Tensor) and not by.dim()
        given = dict(zip(("log_probs", "targets", "input_lengths", "target_lengths"), args, strict=False))
        given |= kwargs or {}
        if func in (torch.ctc_loss, F.ctc_loss) and any(
            isinstance(found := given.get(name), Tensor) and bool((found < 0).any())
            for name in given
            if name != "log_probs"
        ):
            raise ValueError("ctc_loss reads memory that is not there for targets below zero")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize < self.dtype.itemsize:
            self.dtype = result.dtype if result.requires_grad else self.dtype
        return result


def _is_masked(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
