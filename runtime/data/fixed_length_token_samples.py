"""Windows of token shards: samples of `sequence` inputs, each with the token that follows as its target.

    shard        │ a b c . d e . f g h i j . │            . ends a document; sequence = 4

    packed       inputs a b c .   d e . f   g h i j       windows side by side, across documents; of a shard, the
                 targets b c . d   e . f g   h i j .      tokens behind the last whole window are left out
    unpacked     a b c    d e    f g h i   j              a window begins with each document, and where one before it
                 b c .    e .    g h i j   .              ended; the rest is padded, and its targets are ignored

With documents kept apart, packed windows come with the number of the document of each input, counted from the window's
first, and a target that belongs to the next document is ignored.

Windows are found by their number: by division, or by the number of windows before every 1024th document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quintsched.tokens import Shard, TokenFolder

from .memory_dataset import IGNORED_TARGET, PADDING, Indices

INDEXED = 1024
"""Documents whose windows are counted together."""

TokenNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Rows of a batch as they are read; a row that nothing is read into is padding.

    Most of the work is done by operations that release Python's lock, so that a thread can do it beside a step.

    Attributes:
        ids: ids of a row, inputs and last target, (rows, sequence + 1), of the type that files have; None: not read.
        lengths: number of targets of each row, (rows,).
        begins: whether a document begins at a token behind the first, (rows, sequence + 1); None: it does not matter.
    """

    ids: npt.NDArray[Any] | None
    lengths: TokenNumbers
    begins: npt.NDArray[np.bool_] | None

    @staticmethod
    def of_padding(rows: int, sequence: int, *, dtype: np.dtype[Any] | None, apart: bool) -> BatchRows:
        """Return rows of padding; without a dtype, ids are not read."""
        shape = rows, sequence + 1
        ids = None if dtype is None else np.zeros(shape, dtype)
        return BatchRows(ids, np.zeros(rows, np.int64), np.zeros(shape, np.bool_) if apart else None)

    def samples(self) -> tuple[TokenNumbers | None, TokenNumbers | None, TokenNumbers | None]:
        """Return inputs, targets and documents, int64 (rows, sequence) each, or None."""
        documents = None if self.begins is None else self.begins[:, :-1].cumsum(1, dtype=np.int64)
        if self.ids is None:
            return None, None, documents
        inputs, targets = self.ids[:, :-1].astype(np.int64), self.ids[:, 1:].astype(np.int64)
        for row in np.flatnonzero(self.lengths < inputs.shape[1]):
            inputs[row, self.lengths[row] :] = 0
            targets[row, self.lengths[row] :] = IGNORED_TARGET
        if self.begins is not None:
            np.copyto(targets, IGNORED_TARGET, where=self.begins[:, 1:])
        return inputs, targets, documents


class Windows(ABC):
    """Windows of a folder of token shards; `len` is their number.

    Args:
        folder: the shards.
        sequence: inputs of a window.
    """

    def __init__(self, folder: TokenFolder, sequence: int) -> None:
        self.folder, self.sequence = folder, sequence

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read_windows(self, windows: Indices, into: BatchRows, rows: Indices) -> None:
        """Read windows, by their numbers, into rows of a batch; raises `InputError` for ids that are none."""


class PackedWindows(Windows):
    """Windows side by side, across documents; with `apart`, documents are numbered, and targets kept within them.

    Raises `InputError`, with `apart`, for ends of documents that are out of order.
    """

    def __init__(self, folder: TokenFolder, sequence: int, *, apart: bool) -> None:
        super().__init__(folder, sequence)
        counts = [(shard.entry.tokens - 1) // sequence for shard in folder.shards]
        self._before = np.cumsum([0, *counts])
        for shard in folder.shards if apart else ():
            for _ in shard.ends_in_blocks():
                pass

    def __len__(self) -> int:
        return int(self._before[-1])

    def read_windows(self, windows: Indices, into: BatchRows, rows: Indices) -> None:
        """Read windows into rows of a batch: those of a shard at once."""
        shards = np.searchsorted(self._before, windows, side="right") - 1
        for number in np.unique(shards):
            mine = shards == number
            starts = (windows[mine] - self._before[number]) * self.sequence
            self._read_of(self.folder.shards[number], starts, into, rows[mine])

    def _read_of(self, shard: Shard, starts: TokenNumbers, into: BatchRows, rows: Indices) -> None:
        if into.ids is not None:
            ids = np.lib.stride_tricks.sliding_window_view(shard.tokens, self.sequence + 1)[starts]
            _require_ids(shard, ids, starts)
            into.ids[rows], into.lengths[rows] = ids, self.sequence
        if into.begins is not None:
            row, place = _begins(shard, starts, self.sequence + 1)
            into.begins[rows[row], place] = True


class DocumentWindows(Windows):
    """Windows within documents; a document of n tokens has ⌈(n - 1) / sequence⌉ of them.

    All ends of documents are read once, and 8 bytes kept for each 1024 documents.
    Raises `InputError` for ends of documents that are out of order.
    """

    def __init__(self, folder: TokenFolder, sequence: int) -> None:
        super().__init__(folder, sequence)
        counts, places = [0], []
        for shard in folder.shards:
            begin = np.uint64(0)
            for number, ends in enumerate(shard.ends_in_blocks(INDEXED)):
                counts.append(int(self._counts(np.diff(ends, prepend=begin).astype(np.int64)).sum()))
                places.append((shard.number, number * INDEXED))
                begin = ends[-1]
        self._before, self._places = np.cumsum(counts), np.array(places)

    def _counts(self, lengths: TokenNumbers) -> TokenNumbers:
        return (lengths + self.sequence - 2) // self.sequence

    def __len__(self) -> int:
        return int(self._before[-1])

    def read_windows(self, windows: Indices, into: BatchRows, rows: Indices) -> None:
        """Read windows into rows of a batch."""
        if into.ids is None:
            return
        for row, window in zip(rows.tolist(), windows.tolist(), strict=True):
            shard, start, stop = self._place(window)
            ids = shard.tokens[start:stop]
            shard.require_ids(ids, start)
            into.ids[row, : len(ids)], into.lengths[row] = ids, len(ids) - 1

    def _place(self, window: int) -> tuple[Shard, int, int]:
        """Return the shard of a window, and where its inputs begin and its targets end."""
        block = int(np.searchsorted(self._before, window, side="right")) - 1
        number, first = self._places[block].tolist()
        shard = self.folder.shards[number]
        begin = int(shard.ends[first - 1]) if first else 0
        ends = shard.ends[first : first + INDEXED].astype(np.int64)
        lengths = np.diff(ends, prepend=begin)
        behind = np.cumsum(self._counts(lengths)) + self._before[block]
        document = int(np.searchsorted(behind, window, side="right"))
        nth = window - int(behind[document] - self._counts(lengths[document : document + 1])[0])
        start = int(ends[document] - lengths[document]) + nth * self.sequence
        return shard, start, min(start + self.sequence + 1, int(ends[document]))


def real_rows(numbers: Indices) -> Indices:
    """Return the rows of a batch that are no padding."""
    return np.flatnonzero(numbers != PADDING)


def _begins(shard: Shard, starts: TokenNumbers, count: int) -> tuple[TokenNumbers, TokenNumbers]:
    """Return the row and the place in it of each document that begins behind the first of `count` tokens of a row."""
    first, last = (
        np.searchsorted(shard.ends, at.astype(np.uint64), side="right") for at in (starts, starts + count - 1)
    )
    within = last - first
    rows = np.repeat(np.arange(len(starts)), within)
    ends = np.arange(len(rows)) + np.repeat(first - (np.cumsum(within) - within), within)
    return rows, shard.ends[ends].astype(np.int64) - starts[rows]


def _require_ids(shard: Shard, ids: npt.NDArray[Any], starts: TokenNumbers) -> None:
    if len(ids) and ids.max() >= shard.vocabulary:
        row = int(ids.max(1).argmax())
        shard.require_ids(ids[row], int(starts[row]))
