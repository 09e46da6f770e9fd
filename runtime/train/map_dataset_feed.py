"""Feed of map-style data sets of torch: batches that all ranks know by seed and epoch, divided over the replicas.

    epoch, seed ──▶ batch 0: samples 7 3 9 1 …      replica 0: 7 3 …     replica 1: 9 1 …

The order depends on neither mesh nor world size, so a run goes on to the same sample on any; nothing is saved of it.
A smaller last batch is divided as evenly as can be, also where some replicas get no samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from quintsched.errors import MisfitError, UsageError, counted

from ..agreement.sections import Record
from ..data import PADDING, BatchSampler, DataSpec
from ..data.user_loaders import MIXED, UNKNOWN_SPEC, LoadedBatch, Say, batch_of, is_map_style
from ..settings.job_file import Samples, TrainConfig
from ..stage.batches.microbatches import without_samples


class MapFeed:
    """Batches of one replica.

    Args:
        train, validation: data sets with a length, whose samples torch's default collation joins; None: no validation.
        settings: the batch size and the seed.
        share: this replica, and how many there are.
        spec: sizes that a built-in model is built for.

    Raises `UsageError` for a data set without samples, or with fewer in the first batch than there are replicas.
    """

    is_of_loaders = is_last = False

    def __init__(
        self,
        train: Dataset[Any],
        validation: Dataset[Any] | None,
        settings: TrainConfig,
        share: tuple[int, int],
        spec: DataSpec = UNKNOWN_SPEC,
    ) -> None:
        self._sets, self._share, self._size, self.spec = (train, validation), share, settings.batch_size, spec
        if not (validation is None or is_map_style(validation)):
            raise UsageError(MIXED)
        sizes = [0 if one is None else len(one) for one in self._sets]  # type: ignore[arg-type]
        size, seed = settings.batch_size, settings.seed
        if min(sizes[0], size) < share[1]:
            samples, replicas = counted(min(sizes[0], size), "sample"), counted(share[1], "replica")
            raise UsageError(f"batches of {samples} do not divide over {replicas}")
        self._train = BatchSampler(num_samples=sizes[0], batch_size=size, seed=seed)
        self._validation = (
            BatchSampler(num_samples=sizes[1], batch_size=size, seed=seed, shuffle=False) if sizes[1] else None
        )
        self.num_batches = self._train.num_batches
        self.settings: Record = {"data.training_samples": sizes[0], "data.validation_samples": sizes[1]}

    def train(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        """Yield the batches of an epoch from number `start` on."""
        return map(batch_of, self._batches(0, self._train.batches(epoch, start=start)))

    def validation(self) -> Iterator[LoadedBatch]:
        """Yield all batches of validation, if there are any."""
        given = () if self._validation is None else self._validation.batches(0)
        return map(batch_of, self._batches(1, given))

    def once(self, samples: Samples) -> Iterator[LoadedBatch]:
        """Yield this replica's part of a split, of which each sample is in one part, in order, batch by batch.

        Raises `MisfitError` where there is no validation.
        """
        data: Any = self._sets[samples == "validation"]
        if data is None:
            raise MisfitError("there is no data set of validation; return a pair of data sets, or say samples: train")
        replica, num_replicas = self._share
        mine, each = np.array_split(np.arange(len(data)), num_replicas)[replica], max(self._size // num_replicas, 1)
        for start in range(0, len(mine), each):
            yield batch_of(default_collate([data[index] for index in mine[start : start + each].tolist()]))

    def _batches(self, number: int, given: Any) -> Iterator[Any]:
        replica, num_replicas = self._share
        data: Any = self._sets[number]
        for indices in given:
            mine: Sequence[int] = np.array_split(indices[indices != PADDING], num_replicas)[replica].tolist()
            if mine:
                yield default_collate([data[index] for index in mine])
            else:
                yield without_samples(default_collate([data[0]]))

    def example(self, samples: int) -> Tensor:
        """Return inputs of so many samples."""
        data: Any = self._sets[0]
        inputs, _, _ = batch_of(default_collate([data[index % len(data)] for index in range(samples)]))
        return torch.as_tensor(inputs)

    def state(self) -> bytes | None:
        """Return None: batches follow from the epoch."""

    def restore(self, state: bytes | None, epoch: int, batch: int, say: Say) -> None:
        """Do nothing: batches follow from the epoch."""
