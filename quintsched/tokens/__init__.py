"""Token shards: a folder of token ids on disk, written once, checked when it is opened, and read by memory map.

    texts ─▶ Tokenizer ─▶ TokenWriter ─▶ DIR/index.json, shard-00000.tokens, shard-00000.documents, …
                                         DIR ─▶ open_tokens ─▶ TokenFolder

Imports `files`, `errors`; needs numpy alone. A tokenizer of transformers is imported where one is asked for.
"""

from .shard_index import ShardEntry, TokenIndex
from .shard_reader import Shard, TokenFolder, open_tokens
from .shard_writer import TokenWriter
from .tokenizers import Tokenizer, documents_of, find_tokenizer

__all__ = [
    "Shard",
    "ShardEntry",
    "TokenFolder",
    "TokenIndex",
    "TokenWriter",
    "Tokenizer",
    "documents_of",
    "find_tokenizer",
    "open_tokens",
]
