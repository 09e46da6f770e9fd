"""A copy of a rank's state in its host's memory, which is written while training goes on.

step 120   state ──copy──▶ buffer ──▶ written by a thread
step 121   state changes        │
step 240   state ──copy──▶ the same buffer, as soon as it is written
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.device import is_accelerator, synchronize
from .shard_file import Layout


class HostBuffer:
    """Takes copies of a rank's state; the memory of the last one serves again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[Layout, Tensor]:
        """Copy tensors; return where they lie in which memory, which the next call overwrites."""
        layout = Layout.of(state, metadata)
        if len(self._memory) != layout.num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # there never are two
            self._memory = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=is_accelerator(self._device))
        for name, place in layout.views(self._memory).items():
            place.copy_(state[name], non_blocking=True)
        synchronize(self._device)
        return layout, self._memory
