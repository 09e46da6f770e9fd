"""Index of a folder of token shards: the only file that is parsed; all others are plain arrays of known sizes.

{"format": "quintsched.tokens", "version": 1, "dtype": "uint16", "vocabulary": 256, "tokenizer": "bytes", "end": 0,
 "shards": [{"tokens": 14, "documents": 2, "tokens_sha256": "9f…", "documents_sha256": "03…"}]}

shard-00000.tokens       ids, one after the other: little-endian, `dtype`, `tokens` of them
shard-00000.documents    positions behind the last token of each document: little-endian uint64, strictly ascending
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quintsched.errors import InputError, UsageError
from quintsched.files.read_plain_files_only import read_plain
from quintsched.files.strictjson import describe_faults, parse_strict
from quintsched.files.user_records import FormatVersion

TOKEN_INDEX_FILE = "index.json"
MOST_INDEX_BYTES = 2**28
"""Longest index that is read."""

MOST_NAME = 500
"""Letters of a tokenizer's name."""

TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DOCUMENT_ENDS: np.dtype[Any] = np.dtype("<u8")

Count = Annotated[int, Field(ge=1, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _IndexModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ShardEntry(_IndexModel):
    """Sizes of a shard, and the SHA-256 of its two files."""

    tokens: Count
    documents: Count
    tokens_sha256: Sha256
    documents_sha256: Sha256


class TokenIndex(_IndexModel):
    """Content of `index.json`; `end` is the id that ends each document, or None."""

    format: Literal["quintsched.tokens"]
    version: FormatVersion
    dtype: Literal["uint16", "uint32"]
    vocabulary: Annotated[int, Field(ge=1, le=2**32)]
    tokenizer: Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
    end: Annotated[int, Field(ge=0)] | None
    shards: Annotated[tuple[ShardEntry, ...], Field(strict=False, min_length=1, max_length=100_000)]

    @model_validator(mode="after")
    def _ids_fit(self) -> TokenIndex:
        if self.vocabulary > 2 ** (8 * self.numbers.itemsize):
            raise ValueError(f"a vocabulary of {self.vocabulary} does not fit {self.dtype}")
        if self.end is not None and self.end >= self.vocabulary:
            raise ValueError(f"end {self.end} is not in the vocabulary of {self.vocabulary}")
        return self

    @property
    def numbers(self) -> np.dtype[Any]:
        """Type of an id in a file."""
        return TOKEN_DTYPES[self.dtype]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    def to_text(self) -> str:
        """Return it as JSON, a shard per line."""
        head = self.model_dump(exclude={"shards"})
        shards = ",\n  ".join(json.dumps(shard.model_dump()) for shard in self.shards)
        return f'{json.dumps(head)[:-1]},\n "shards": [\n  {shards}]}}\n'


def dtype_for(vocabulary: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type of ids for a vocabulary."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def tokens_name(shard: int) -> str:
    """Return the name of a shard's file of ids."""
    return f"shard-{shard:05}.tokens"


def documents_name(shard: int) -> str:
    """Return the name of a shard's file of documents' ends."""
    return f"shard-{shard:05}.documents"


def read_index(folder: Path) -> TokenIndex:
    """Return the index of a folder.

    Raises `UsageError` where there is no such folder, `InputError` for one without an index or with a broken one.
    """
    path = folder / TOKEN_INDEX_FILE
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder of tokens; `quintsched data tokenize` writes one")
    if not path.exists():
        raise InputError(
            f"{folder}: it has no {TOKEN_INDEX_FILE}: it is no folder of tokens, or its writing was interrupted; "
            "write it again"
        )
    try:
        return TokenIndex.model_validate(parse_strict(read_plain(path, "the index of the tokens", MOST_INDEX_BYTES)))
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from None
    except InputError as error:
        words = str(error)
        raise InputError(words if words.startswith(str(path)) else f"{path}: {words}") from None
