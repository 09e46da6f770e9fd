"""What is known of torch's own DataLoader and its samplers, whose order follows from generators alone.

DataLoader ── batch_sampler ── sampler ─▶ indices of a batch ─▶ samples, read in this process or by workers
                                └ advanced alone: batches that nobody wants are not read
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_KNOWN = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, as far as it has some."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def with_epochs(loader: Any) -> list[Any]:
    """Return those of its samplers whose order follows from the number of the epoch."""
    found = {id(sampler): sampler for sampler in samplers_of(loader) if hasattr(sampler, "set_epoch")}
    return list(found.values())


def can_pass_over(loader: Any, *, goes_on: bool) -> bool:
    """Whether what a loader gives in a pass follows from where generators were as it began, and from the epoch.

    With `goes_on`, samplers are not told the epoch. Workers that outlive a pass have generators that nobody sees.
    """
    if type(loader) in (list, tuple):
        return True
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.persistent_workers:
        return False
    told = () if goes_on else with_epochs(loader)
    return all(type(sampler) in _KNOWN or sampler in told for sampler in samplers_of(loader))


def knows_indices(batches: Iterator[Any]) -> bool:
    """Whether the next batch of an iterator can be passed over without reading it: no worker has been asked for it."""
    return hasattr(batches, "_next_index") and not getattr(batches, "_num_workers", 1)


def passed_over(batches: Any) -> object:
    """Pass over a batch, of which only the indices are found; None: there is none."""
    try:
        return batches._next_index()
    except StopIteration:
        return None
