"""Training data of a run: data sets in memory or token shards on disk, and the samples of each batch.

    load_dataset(job.data) ─▶ Dataset ─┬─ gather_batch(dataset.train, indices) ─▶ inputs, targets
    BatchSampler(…).batches(epoch) ────┤
    load_dataset(job.data) ─▶ TokenDataset ─ dataset.train.batch(indices, epoch, seed)

Every rank computes the same batches from (seed, epoch) alone; no message is needed. In place of a data set, `Loaders`
wrap the user's; `PackedStream` packs a stream of texts, `PromptAnswers` are for fine-tuning.
Imports `user_objects`, `settings`.
"""

from .batches_from_text_stream import PackedStream
from .data_sources import has_extras, knows_replica, load_dataset
from .memory_dataset import IGNORED_TARGET, PADDING, BatchSampler, Dataset, DataSpec, Normalization, Split, gather_batch
from .prompt_answer_samples import PromptAnswers, chat, concatenated, pad_batch
from .token_mixture import MixturePart, TokenOptions, load_tokens
from .token_sample_order import TokenDataset, TokenSamples
from .user_loaders import Loaders

__all__ = [
    "IGNORED_TARGET",
    "PADDING",
    "BatchSampler",
    "DataSpec",
    "Dataset",
    "Loaders",
    "MixturePart",
    "Normalization",
    "PackedStream",
    "PromptAnswers",
    "Split",
    "TokenDataset",
    "TokenOptions",
    "TokenSamples",
    "chat",
    "concatenated",
    "gather_batch",
    "has_extras",
    "knows_replica",
    "load_dataset",
    "load_tokens",
    "pad_batch",
]
