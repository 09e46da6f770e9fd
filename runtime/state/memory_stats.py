"""How many bytes of weights and gradients are resident on a rank, counted where their memory is taken and freed.

weights    ▁▁▂▂▁▁▂▂▁▁   ◀─ peak: the most that was resident at once
gradients  ▁▁▁▁▂▂▁▁▂▂
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class MemoryKind(Enum):
    """What memory is used for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class StateBytes:
    """The most bytes that were resident on a rank: of each kind, and of all together.

    Masters of weights in bf16 or fp16 count as the optimizer's. Buffers do not count, nor what is on its way through
    autograd.
    """

    weights: int
    gradients: int
    optimizer: int
    total: int


class MemoryStats:
    """Counts bytes; the peaks are those since `read`, or the beginning."""

    def __init__(self) -> None:
        self._resident = dict.fromkeys(MemoryKind, 0)
        self._peaks = dict.fromkeys(MemoryKind, 0)
        self._peak = 0

    def add(self, kind: MemoryKind, num_bytes: int) -> None:
        """Count bytes that are now resident, or, if negative, no longer are."""
        self._resident[kind] += num_bytes
        self._peaks[kind] = max(self._peaks[kind], self._resident[kind])
        self._peak = max(self._peak, sum(self._resident.values()))

    def read(self, optimizer: int) -> StateBytes:
        """Return the peaks, and begin anew; what the optimizer keeps is resident all the time."""
        weights, gradients = self._peaks[MemoryKind.WEIGHTS], self._peaks[MemoryKind.GRADIENTS]
        found = StateBytes(weights, gradients, optimizer, self._peak + optimizer)
        self._peaks, self._peak = dict(self._resident), sum(self._resident.values())
        return found


class ResizableStorage:
    """The memory of a tensor, which can be freed and taken again; views into it stay the same tensors.

    To autograd nothing has changed: what it saved is valid again as soon as the same numbers are there again.
    """

    def __init__(self, tensor: Tensor, kind: MemoryKind, stats: MemoryStats) -> None:
        self._storage = tensor.untyped_storage()
        self._num_bytes, self._counted = self._storage.nbytes(), tensor.nbytes
        self._kind, self._stats = kind, stats
        self.is_resident = True
        stats.add(kind, self._counted)

    def allocate(self) -> None:
        """Take the memory, whatever is in it, where it is not resident."""
        if not self.is_resident:
            self.is_resident = True
            self._storage.resize_(self._num_bytes)
            self._stats.add(self._kind, self._counted)

    def free(self) -> None:
        """Give the memory back."""
        if self.is_resident:
            self.is_resident = False
            self._storage.resize_(0)
            self._stats.add(self._kind, -self._counted)
