"""Writer of token shards: documents one after the other, a new shard where one is full, the index last.

    with TokenWriter("corpus", vocabulary=50257, tokenizer="gpt2", end=50256) as writer:
        for ids in documents:
            writer.add(ids)

A document lies in one shard. The index is written when the context ends without an error; a folder without it is
refused by whoever reads it. After an error, the files that were begun are removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quintsched.errors import UsageError, quoted
from quintsched.files.atomic import write_whole, writing

from .shard_index import (
    DOCUMENT_ENDS,
    MOST_NAME,
    TOKEN_DTYPES,
    TOKEN_INDEX_FILE,
    ShardEntry,
    TokenIndex,
    documents_name,
    dtype_for,
    tokens_name,
)

SHARD_TOKENS = 2**28
"""Tokens after which a shard is full."""


class _File:
    """File of numbers that is written from its beginning to its end, with the digest of its content."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype, self.count = path, dtype, 0
        self._digest = hashlib.sha256()
        with writing(path, "the tokens"):
            self._file: BinaryIO = path.open("xb")

    def append(self, numbers: npt.NDArray[Any]) -> None:
        content = numbers.astype(self._dtype).tobytes()
        self._digest.update(content)
        self.count += len(numbers)
        with writing(self.path, "the tokens"):
            self._file.write(content)

    def close(self) -> str:
        """Bring it to the disk; return the digest."""
        with writing(self.path, "the tokens"), self._file as file:
            file.flush()
            os.fsync(file.fileno())
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close it as it is."""
        with suppress(OSError):
            self._file.close()


class TokenWriter:
    """Writes documents to a new folder of token shards; a context manager.

    Args:
        folder: a folder that is empty, or not there yet.
        vocabulary: number of ids; up to 65536 of them take two bytes each, more take four.
        tokenizer: the name of the tokenizer that made the ids, for people and for comparison.
        end: id that is appended to each document; None: none is.
        shard_tokens: number of tokens after which a new shard begins.

    Raises `UsageError` for sizes out of range and a folder that is not empty, `WriteError` for a full disk.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        vocabulary: int,
        tokenizer: str,
        end: int | None = None,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        if not 1 <= vocabulary <= 2**32 or shard_tokens < 1 or (end is not None and not 0 <= end < vocabulary):
            raise UsageError(
                "tokens: a vocabulary has 1 to 2**32 ids, `end` is one of them, a shard has tokens; not "
                f"vocabulary={vocabulary}, end={end}, shard_tokens={shard_tokens}"
            )
        if not 1 <= len(tokenizer) <= MOST_NAME:
            raise UsageError(f"tokens: a tokenizer has a name of 1 to {MOST_NAME} letters, not {quoted(tokenizer)}")
        self.folder, self._vocabulary, self._tokenizer = Path(folder), vocabulary, tokenizer
        self._shard_tokens = shard_tokens
        self._end = np.array([] if end is None else [end], dtype=np.int64)
        self._dtype = dtype_for(vocabulary)
        self._shards: list[ShardEntry] = []
        self._open: tuple[_File, _File] | None = None
        self._documents = 0
        with writing(self.folder, "the tokens"):
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise UsageError(f"{self.folder}: the folder is not empty; name a new one, or remove it first")

    def add(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Append a document of ids, (length,); one without ids is left out.

        Raises `UsageError` for anything but ids of the vocabulary, with the number of the document, from 0.
        """
        document = np.asarray(ids)
        number, self._documents = self._documents, self._documents + 1
        if not document.size:
            return
        if document.ndim != 1 or document.dtype.kind not in "iu":
            raise UsageError(
                f"document {number}: ids are whole numbers in one row, not {document.dtype} of shape {document.shape}"
            )
        low, high = int(document.min()), int(document.max())
        if low < 0 or high >= self._vocabulary:
            odd = low if low < 0 else high
            at = int(np.flatnonzero(document == odd)[0])
            raise UsageError(
                f"document {number}: id {odd} at place {at} is not in the vocabulary of {self._vocabulary}"
            )
        if self._open is None:
            shard = len(self._shards)
            self._open = (
                _File(self.folder / tokens_name(shard), TOKEN_DTYPES[self._dtype]),
                _File(self.folder / documents_name(shard), DOCUMENT_ENDS),
            )
        tokens, documents = self._open
        tokens.append(document)
        if len(self._end):
            tokens.append(self._end)
        documents.append(np.array([tokens.count]))
        if tokens.count >= self._shard_tokens:
            self._close_shard()

    def close(self) -> TokenIndex:
        """Finish the last shard, write the index, and return it; raises `UsageError` where there is no token."""
        self._close_shard()
        if not self._shards:
            raise UsageError(f"{self.folder}: there is no token to write: all documents are empty")
        index = TokenIndex(
            format="quintsched.tokens",
            version=1,
            dtype=self._dtype,
            vocabulary=self._vocabulary,
            tokenizer=self._tokenizer,
            end=int(self._end[0]) if len(self._end) else None,
            shards=tuple(self._shards),
        )
        write_whole(self.folder / TOKEN_INDEX_FILE, index.to_text(), "the index of the tokens", durable=True)
        return index

    def _close_shard(self) -> None:
        if self._open is None:
            return
        (tokens, documents), self._open = self._open, None
        self._shards.append(
            ShardEntry(
                tokens=tokens.count,
                documents=documents.count,
                tokens_sha256=tokens.close(),
                documents_sha256=documents.close(),
            )
        )

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        for file in self._open or ():
            file.abandon()
        for shard in range(len(self._shards) + 1):
            for name in (tokens_name(shard), documents_name(shard)):
                with suppress(OSError):
                    (self.folder / name).unlink()
