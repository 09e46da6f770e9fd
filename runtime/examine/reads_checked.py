"""What torch would read of memory that is not there, as it does not look, is refused while users' losses are tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class ReadsChecked(TorchFunctionMode):
    """While it is entered, what torch does not check itself before it reads memory is refused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("log_probs", "targets", "input_lengths", "target_lengths"), args, strict=False))
        given |= kwargs or {}
        if func in (torch.ctc_loss, F.ctc_loss) and any(
            isinstance(found := given.get(name), Tensor) and bool((found < 0).any())
            for name in given
            if name != "log_probs"
        ):
            raise ValueError("ctc_loss reads memory that is not there for targets below zero")
        return func(*args, **(kwargs or {}))
