"""Data sets in memory: a training and a validation split, each in its compact original dtype.

Bytes stay bytes until a batch is gathered; only then are they scaled to float32, or become token ids.

The samples of each batch are a pure function of (seed, epoch).

    8 samples, batches of 3, epoch e:   [5 0 7] [2 4 1] [6 3 ·]        · = PADDING

Each batch has the full size, so that shapes never change; the last one is padded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError, counted

DIGESTED = 256
"""Number of samples of a split that are hashed."""

IGNORED_TARGET = -100
"""Target of a padding row; the loss ignores it."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Sizes that a model is built for: the shape of one sample's input, and the number of classes."""

    input_shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Scale to zero mean and unit variance: (x − mean) / std, in the units of the stored inputs."""

    mean: float
    std: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Samples: inputs (N, …) of any type, targets (N, …) of any integer type.

    In a batch, inputs are float32 with a normalization, int64 where they are token ids (`has_ids`), and
    otherwise of the type they have here; targets are int64.
    Raises MisfitError where there are not as many inputs as targets, or none.
    """

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.integer[Any]]
    normalization: Normalization | None = None
    has_ids: bool = False

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or not len(self.inputs):
            raise MisfitError(
                f"a split needs as many inputs as targets, and at least one: "
                f"there are {len(self.inputs)} inputs and {len(self.targets)} targets"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def digest(self) -> str:
        """Return a digest of some samples, evenly spread, their dtype and normalization, to detect other data."""
        rows = np.linspace(0, len(self) - 1, min(len(self), DIGESTED), dtype=np.int64)
        digest = hashlib.sha256(f"{self.inputs.dtype} {self.normalization} {self.has_ids}".encode())
        for numbers in (self.inputs[rows], self.targets[rows]):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A training and a validation split. Raises MisfitError where their samples differ in shape."""

    name: str
    train: Split
    validation: Split
    num_classes: int

    def __post_init__(self) -> None:
        ours, theirs = self.train.inputs.shape[1:], self.validation.inputs.shape[1:]
        if ours != theirs:
            raise MisfitError(f"{self.name}: training samples have the shape {ours}, validation samples {theirs}")

    @property
    def spec(self) -> DataSpec:
        """Sizes that a model is built for."""
        return DataSpec(input_shape=self.train.inputs.shape[1:], num_classes=self.num_classes)


def gather_batch(split: Split, indices: Indices) -> tuple[Tensor, Tensor]:
    """Return inputs (B, …) and targets (B, …) of the samples at `indices` (B,).

    Where the index is PADDING the input is zero and the target IGNORED_TARGET.
    """
    padding = indices == PADDING
    rows = np.where(padding, 0, indices)
    inputs, targets = split.inputs[rows], split.targets[rows].astype(np.int64, copy=False)
    if split.normalization is not None:
        inputs = (inputs.astype(np.float32) - split.normalization.mean) / split.normalization.std
    if split.has_ids:
        inputs = inputs.astype(np.int64, copy=False)
    inputs[padding] = 0
    targets[padding] = IGNORED_TARGET
    return torch.from_numpy(inputs), torch.from_numpy(targets)


Indices: TypeAlias = npt.NDArray[np.int64]

PADDING = -1
"""Index of a padding row."""


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
                f"{counted(self.num_samples, 'sample')} in batches of {self.batch_size}"
            )
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"a seed is a number from 0 to 2**64 - 1, not {self.seed}")

    @property
    def num_batches(self) -> int:
        """Number of batches of one epoch, the padded one included."""
        return -(-self.num_samples // self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """Yield the batches of `epoch` from number `start` on: int64 (batch_size,), padded with PADDING."""
        order = self._order(epoch) if self.shuffle else None
        for batch in range(start, self.num_batches):
            first, behind = batch * self.batch_size, min((batch + 1) * self.batch_size, self.num_samples)
            indices = np.arange(first, behind) if order is None else order[first:behind]
            yield np.pad(indices, (0, self.batch_size - len(indices)), constant_values=PADDING)

    def _order(self, epoch: int) -> Indices:
        """Return the samples of an epoch in order.

        Philox's raw numbers are sorted, rather than numpy's permutation used: numpy promises the former to be the same
        in every release, and ranks and resumed runs may have different ones.
        """
        key = np.array([self.seed, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.num_samples), kind="stable")
