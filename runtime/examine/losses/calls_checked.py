"""What a user's loss calls while it is tried: in which numbers, and memory that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class CallsChecked(TorchFunctionMode):
    """While it is entered, what torch does not check itself before it reads memory is refused.

    Attributes:
        dtype: the shortest type of floating numbers that a gradient goes through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
