"""Which samples make which batch: a pure function of (seed, epoch).

    8 samples, batches of 3, epoch e:   [5 0 7] [2 4 1] [6 3 ·]        · = PADDING

Each batch has the full size, so that shapes never change; the last one is filled up with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.errors import UsageError

Indices: TypeAlias = npt.NDArray[np.int64]

PADDING = -1
"""The index that means no sample."""


@dataclass(frozen=True, kw_only=True)
class BatchSampler:
    """Batches of sample indices, the same on every rank without a message.

    Raises UsageError where there are no samples, or the batch size or the seed is out of range.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise UsageError(
                f"batches need samples and a batch size of at least 1, not "
                f"{self.num_samples} samples in batches of {self.batch_size}"
            )
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"a seed is a number from 0 to 2**64 - 1, not {self.seed}")

    @property
    def num_batches(self) -> int:
        """Batches of one epoch, the padded one included."""
        return -(-self.num_samples // self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """Yield the batches of `epoch` from number `start` on: int64 (batch_size,), padded with PADDING."""
        order = self._order(epoch)
        for batch in range(start, self.num_batches):
            indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield np.pad(indices, (0, self.batch_size - len(indices)), constant_values=PADDING)

    def _order(self, epoch: int) -> Indices:
        """Return the samples of an epoch in order.

        Sorting Philox's raw numbers instead of asking for a permutation: numpy promises the former to be the same
        in every release, and ranks and resumed runs may have different ones.
        """
        if not self.shuffle:
            return np.arange(self.num_samples)
        key = np.array([self.seed, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.num_samples), kind="stable")
