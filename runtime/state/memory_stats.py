"""How many bytes of weights and gradients stand on a rank, counted where their memory comes and goes.

weights    ▁▁▂▂▁▁▂▂▁▁   ◀─ peak: the most that stood at once
gradients  ▁▁▁▁▂▂▁▁▂▂
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Held(Enum):
    """What memory is held for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class StateBytes:
    """The most bytes that stood on a rank: of each, and of all together.

    Masters of weights in bf16 or fp16 count as the optimizer's. Buffers do not count, nor what is on its way through
    autograd.
    """

    weights: int
    gradients: int
    optimizer: int
    total: int


class Ledger:
    """Counts bytes; the peaks are those since `read`, or the beginning."""

    def __init__(self) -> None:
        self._standing = dict.fromkeys(Held, 0)
        self._peaks = dict.fromkeys(Held, 0)
        self._peak = 0

    def add(self, held: Held, num_bytes: int) -> None:
        """Count bytes that now stand, or, if there are fewer than none, no longer do."""
        self._standing[held] += num_bytes
        self._peaks[held] = max(self._peaks[held], self._standing[held])
        self._peak = max(self._peak, sum(self._standing.values()))

    def read(self, optimizer: int) -> StateBytes:
        """Return the peaks, and begin anew; what the optimizer keeps stands all the time."""
        weights, gradients = self._peaks[Held.WEIGHTS], self._peaks[Held.GRADIENTS]
        found = StateBytes(weights, gradients, optimizer, self._peak + optimizer)
        self._peaks, self._peak = dict(self._standing), sum(self._standing.values())
        return found


class Room:
    """The memory of a tensor, which comes and goes; tensors that look into it stay the same.

    To autograd nothing has changed: what it saved is valid again as soon as the same numbers stand there again.
    """

    def __init__(self, tensor: Tensor, held: Held, ledger: Ledger) -> None:
        self._storage = tensor.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self._held = held
        self._ledger = ledger
        self.stands = True
        ledger.add(held, self._num_bytes)

    def take(self) -> None:
        """Let the memory be there, whatever is in it."""
        if not self.stands:
            self.stands = True
            self._storage.resize_(self._num_bytes)
            self._ledger.add(self._held, self._num_bytes)

    def drop(self) -> None:
        """Give the memory back."""
        if self.stands:
            self.stands = False
            self._storage.resize_(0)
            self._ledger.add(self._held, -self._num_bytes)
