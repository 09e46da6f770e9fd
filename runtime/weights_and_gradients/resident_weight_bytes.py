"""Bytes of weights and gradients resident on a rank, counted where their memory is allocated and freed.

weights    ▁▁▂▂▁▁▂▂▁▁   ◀─ peak: the largest number of bytes resident at once
gradients  ▁▁▁▁▂▂▁▁▂▂
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class MemoryKind(Enum):
    """Use of memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class StateBytes:
    """Peak bytes resident on a rank: of each kind, and of all together.

    Master copies of bf16 or fp16 weights count as the optimizer's. Buffers and temporary autograd memory do not count.
    """

    weights: int
    gradients: int
    optimizer: int
    total: int


class MemoryStats:
    """Counts resident bytes; peaks are since the last `read_peaks`, or the beginning."""

    def __init__(self) -> None:
        self._resident = dict.fromkeys(MemoryKind, 0)
        self._peaks = dict.fromkeys(MemoryKind, 0)
        self._peak = 0

    def add_bytes(self, kind: MemoryKind, num_bytes: int) -> None:
        """Count bytes that become resident or, if negative, are freed."""
        self._resident[kind] += num_bytes
        self._peaks[kind] = max(self._peaks[kind], self._resident[kind])
        self._peak = max(self._peak, sum(self._resident.values()))

    def read_peaks(self, optimizer: int) -> StateBytes:
        """Return the peaks, and reset them; `optimizer` bytes count as always resident."""
        weights, gradients = self._peaks[MemoryKind.WEIGHTS], self._peaks[MemoryKind.GRADIENTS]
        found = StateBytes(weights, gradients, optimizer, self._peak + optimizer)
        self._peaks, self._peak = dict(self._resident), sum(self._resident.values())
        return found


class ResizableStorage:
    """The memory of a tensor, which can be freed and allocated again; views of it stay the same tensors.

    Autograd does not notice: tensors that it saved are valid again as soon as the same numbers are restored.
    """

    def __init__(self, tensor: Tensor, kind: MemoryKind, stats: MemoryStats) -> None:
        self._storage = tensor.untyped_storage()
        self._num_bytes, self._counted = self._storage.nbytes(), tensor.nbytes
        self._kind, self._stats = kind, stats
        self.is_resident = True
        stats.add_bytes(kind, self._counted)

    def allocate(self) -> None:
        """Allocate the memory, uninitialized, where it is not resident."""
        if not self.is_resident:
            self.is_resident = True
            self._storage.resize_(self._num_bytes)
            self._stats.add_bytes(self._kind, self._counted)

    def free(self) -> None:
        """Free the memory."""
        if self.is_resident:
            self.is_resident = False
            self._storage.resize_(0)
            self._stats.add_bytes(self._kind, -self._counted)
