"""A group of one member that runs as if there were others, where shapes and calls matter, and no numbers of theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import DoneWork, Group, SelfGroup, Work


class EchoGroup(SelfGroup):
    """A group whose other members are not there: it has its own tensors for theirs, and its own part of a sum."""

    def __init__(self, size: int, device: torch.device) -> None:
        Group.__init__(self, tuple(range(size)), 0, device)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.view(self.size, *tensor.shape).copy_(tensor)
        return DoneWork()

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        output.copy_(tensor.view(self.size, *output.shape)[0])
        return DoneWork()
