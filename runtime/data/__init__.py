"""Training data of a run: data sets in memory, and the samples of each batch.

    load_dataset(job.data) ─▶ Dataset ─┐
                                       ├─ gather_batch(dataset.train, indices) ─▶ inputs, targets
    BatchSampler(…).batches(epoch) ────┘

Every rank computes the same batches from (seed, epoch) alone, so ranks that need data agree without a message. In place
of a data set, `Loaders` wrap the user's data loaders. Imports `job`.
"""

from .dataset import IGNORED_TARGET, PADDING, BatchSampler, Dataset, DataSpec, Normalization, Split, gather_batch
from .loaders import Loaders
from .sources import knows_replica, load_dataset

__all__ = [
    "IGNORED_TARGET",
    "PADDING",
    "BatchSampler",
    "DataSpec",
    "Dataset",
    "Loaders",
    "Normalization",
    "Split",
    "gather_batch",
    "knows_replica",
    "load_dataset",
]
