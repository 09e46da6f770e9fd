"""Reader of token shards: sizes are checked when a folder is opened, ids and ends are mapped when they are used.

open_tokens(DIR)            index parsed, each file a plain one of exactly its size; nothing is read, no memory taken
shard.tokens, .ends         read-only arrays over the system's page cache, which the ranks of a machine share
shard.ends_in_blocks()      ends of documents, checked to ascend up to the number of tokens
folder.verify()             every byte: digests, ends, ids in the vocabulary
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quintsched.errors import InputError, counted
from quintsched.files.read_plain_files_only import open_plain

from .shard_index import DOCUMENT_ENDS, ShardEntry, TokenIndex, documents_name, read_index, tokens_name

NUMBERS_AT_ONCE = 2**20
"""Numbers that are read at a time."""

StoredIds = npt.NDArray[np.unsignedinteger[Any]]
Ends = npt.NDArray[np.uint64]


class Shard:
    """One shard of a folder.

    Attributes:
        number: its number, from 0.
        entry: its sizes and digests, by the index.
        tokens_path, documents_path: its files.
    """

    def __init__(self, folder: Path, number: int, index: TokenIndex) -> None:
        self.number, self.entry, self._index = number, index.shards[number], index
        self.tokens_path, self.documents_path = folder / tokens_name(number), folder / documents_name(number)

    @property
    def vocabulary(self) -> int:
        """Number of ids that there may be."""
        return self._index.vocabulary

    @cached_property
    def tokens(self) -> StoredIds:
        """Ids: (tokens,), a read-only memory map."""
        return _mapped(self.tokens_path, self._index.numbers, self.entry.tokens)

    @cached_property
    def ends(self) -> Ends:
        """Positions behind the last token of each document: uint64 (documents,), a read-only memory map."""
        return _mapped(self.documents_path, DOCUMENT_ENDS, self.entry.documents)

    def require_sizes(self) -> None:
        """Raise `InputError` unless both files are plain ones of the sizes that the index says."""
        _require_size(self.tokens_path, self._index.numbers, self.entry.tokens)
        _require_size(self.documents_path, DOCUMENT_ENDS, self.entry.documents)

    def ends_in_blocks(self, block: int = NUMBERS_AT_ONCE) -> Iterator[Ends]:
        """Yield the ends of documents, `block` at a time; raises `InputError` for a document that is out of order."""
        before = np.uint64(0)
        for start in range(0, self.entry.documents, block):
            ends = np.asarray(self.ends[start : start + block])
            ascends = np.diff(ends, prepend=before).astype(np.int64) > 0
            ascends &= ends <= np.uint64(self.entry.tokens)
            if not ascends.all():
                at = int(ascends.argmin())
                raise InputError(
                    f"{self.documents_path}: document {start + at} ends at {ends[at]}, not behind the one before and "
                    f"within {counted(self.entry.tokens, 'token')}; write the tokens again"
                )
            before = ends[-1]
            yield ends
        if before != self.entry.tokens:
            raise InputError(
                f"{self.documents_path}: the last document ends at {before}, but there are "
                f"{counted(self.entry.tokens, 'token')}; write the tokens again"
            )

    def require_ids(self, ids: StoredIds, start: int) -> None:
        """Raise `InputError`, with the place, for an id that is not in the vocabulary; they begin at `start`."""
        if len(ids) and ids.max() >= self.vocabulary:
            at = int(ids.argmax())
            raise InputError(
                f"{self.tokens_path}: token {start + at} is {ids[at]}, but the vocabulary has {self.vocabulary} ids; "
                " write the tokens again"
            )

    def verify(self) -> None:
        """Read every byte; raises `InputError` with the file that is not as it was written."""
        for _ in self.ends_in_blocks():
            pass
        for start in range(0, self.entry.tokens, NUMBERS_AT_ONCE):
            self.require_ids(self.tokens[start : start + NUMBERS_AT_ONCE], start)
        files = {self.tokens_path: self.entry.tokens_sha256, self.documents_path: self.entry.documents_sha256}
        for path, digest in files.items():
            with open_plain(path, "the tokens") as (file, _):
                found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            if found != digest:
                raise InputError(
                    f"{path}: its content is not that which was written: SHA-256 {found[:16]}…, by the index "
                    f"{digest[:16]}…; write the tokens again"
                )


class TokenFolder:
    """Token shards of a folder, checked in size.

    Attributes:
        path: the folder.
        index: its index.
        shards: its shards, in order.
    """

    def __init__(self, path: Path, index: TokenIndex) -> None:
        self.path, self.index = path, index
        self.shards = tuple(Shard(path, number, index) for number in range(len(index.shards)))

    def digest(self) -> str:
        """Return a digest (16 digits) of all that the index says, and so of every byte as it was written."""
        return hashlib.sha256(self.index.to_text().encode()).hexdigest()[:16]

    def verify(self) -> None:
        """Read every byte; raises `InputError` with the file, and the place, that is not as it was written."""
        for shard in self.shards:
            shard.verify()


def open_tokens(path: str | Path) -> TokenFolder:
    """Return the token shards of a folder.

    Raises `UsageError` where there is no such folder; `InputError`, in one line that names the file, for a broken
    index, and for a file that is missing, no plain file, or of another size than the index says.
    """
    folder = Path(path)
    found = TokenFolder(folder, read_index(folder))
    for shard in found.shards:
        shard.require_sizes()
    return found


def _require_size(path: Path, dtype: np.dtype[Any], count: int) -> None:
    expected = count * dtype.itemsize
    with open_plain(path, "the tokens") as (_, size):
        if size != expected:
            raise InputError(
                f"{path}: it has {counted(size, 'byte')}, but by the index {counted(count, 'number')} of "
                f"{counted(dtype.itemsize, 'byte')}, {expected}; copy it again, or write the tokens again"
            )


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Return a file's numbers without reading them; a plain array, whose slices are cheaper than those of a memmap."""
    _require_size(path, dtype, count)
    with open_plain(path, "the tokens") as (file, _):
        return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(count,)))


__all__ = ["Ends", "Shard", "ShardEntry", "StoredIds", "TokenFolder", "open_tokens"]
