"""Tensors that collect gradients without being parameters: `self.delta = torch.zeros(8, requires_grad=True)`.

Nobody adds their gradients up over microbatches and ranks, or divides them as the loss is, so code that goes by one is
refused.
"""

from __future__ import annotations

from torch import nn

from quintsched.errors import MisfitError

from ..objects.snapshot import Snapshot


class LooseLeafError(MisfitError):
    """Code goes by a tensor that collects a gradient, and is no parameter."""


def require_no_loose_leaf(held: Snapshot, what: str) -> None:
    """Raise `LooseLeafError` where something holds a tensor that collects a gradient, and is no parameter."""
    for name, tensor in held.tensors():
        if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
            raise LooseLeafError(
                f"{what} goes by {name.lstrip('. ')}, a tensor with requires_grad that is no parameter, so that nobody "
                "adds its gradient up over microbatches and ranks: register it as nn.Parameter(tensor) of a module, "
                "which the optimizer is given, or let it have no gradient"
            )
