"""Batches packed from a stream of texts or ids, such as Hugging Face's `datasets` in streaming mode; with a state.

    documents    "abc" · "d" · "efghij" · …                   · the end of a document, if there is an id for it
    packed        a b c · d · e f g h i j · …
    windows      [a b c ·][d · e f][g h i j] …                4 inputs each; the target of an input is what follows it
    batches of 2  └─ replica 0 ┘ └─ replica 1 ┘               every replica packs all of it, and keeps its rows

So batches are those of one process, on any number of replicas; the price is that each of them encodes all texts. The
state is the number of documents that were read, the state of the source if it has one, and the ids that no batch has
had yet: another process goes on with the batch that is next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from quintsched.errors import UsageError, quoted

StreamIds = npt.NDArray[np.int64]
Encode = Callable[[str], Sequence[int]]


def encode_bytes(text: str) -> Sequence[int]:
    """Return the bytes of a text in UTF-8: ids 0 to 255."""
    return text.encode()


class PackedStream(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of packed documents: a loader by itself, and a data set for `StatefulDataLoader(…, batch_size=None)`.

    It yields inputs and targets, int64 (batch_size / num_replicas, sequence) each. A pass ends with the documents; the
    ids of its last batch, if they do not fill it, are left out.

    Args:
        documents: what is iterated in each pass, over texts, sequences of ids, or mappings that have one under `field`;
            it must begin anew each time. If it has `set_epoch`, that is called with the number of the pass; if it has
            `state_dict` and `load_state_dict`, they are used, else documents that were read are skipped.
        sequence: inputs of a window.
        batch_size: windows of a batch, over all replicas.
        encode: text → ids; by default the bytes of UTF-8.
        end: id that is appended to each document; None: none is.
        field: key of the text, or of the ids, in a mapping.
        replica: number of this replica; num_replicas: how many there are.

    Raises `UsageError` for sizes out of range, and for an iterator, which can be iterated once.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        sequence: int,
        batch_size: int,
        *,
        encode: Encode = encode_bytes,
        end: int | None = None,
        field: str = "text",
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        if sequence < 1 or batch_size < 1 or batch_size % num_replicas or not 0 <= replica < num_replicas:
            raise UsageError(
                "a packed stream has a sequence and a batch_size of at least 1 that its replicas divide; not "
                f"sequence={sequence}, batch_size={batch_size}, replica={replica}, num_replicas={num_replicas}"
            )
        if isinstance(documents, Iterator):
            raise UsageError(
                f"a packed stream iterates its documents anew in each pass, and a {type(documents).__name__} can be "
                "iterated once; give the data set, or an object with __iter__"
            )
        self._documents, self._sequence, self._batch = documents, sequence, batch_size
        self._encode, self._end, self._field = encode, [] if end is None else [end], field
        each = batch_size // num_replicas
        self._mine = slice(replica * each, (replica + 1) * each)
        self._has_state = hasattr(documents, "state_dict") and hasattr(documents, "load_state_dict")
        self._passes, self._read, self._rest = 0, 0, np.empty(0, np.int64)
        self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the batch that was yielded last, as plain data."""
        return {
            "passes": self._passes,
            "read": self._read,
            "rest": torch.from_numpy(self._rest.copy()),
            "documents": self._documents.state_dict() if self._has_state else None,  # type: ignore[attr-defined]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator begin behind the batch that a state was taken behind."""
        self._passes, self._read, self._rest = state["passes"], state["read"], state["rest"].numpy()
        if self._has_state and state["documents"] is not None:
            self._documents.load_state_dict(state["documents"])  # type: ignore[attr-defined]
        self._is_loaded = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise UsageError(f"a packed stream is read by one worker, not by {workers.num_workers}: set num_workers=1")
        documents = self._begin()
        used = self._batch * self._sequence
        while True:
            parts, count = [self._rest], len(self._rest)
            while count <= used and (document := next(documents, None)) is not None:
                parts.append(self._ids(document))
                count += len(parts[-1])
                self._read += 1
            packed = np.concatenate(parts)
            if count <= used:
                break
            self._rest = packed[used:]
            shape = self._batch, self._sequence
            inputs, targets = packed[:used].reshape(shape), packed[1 : used + 1].reshape(shape)
            yield torch.from_numpy(inputs[self._mine]), torch.from_numpy(targets[self._mine])
        self._passes += 1
        self._read, self._rest = 0, np.empty(0, np.int64)

    def _begin(self) -> Iterator[Any]:
        """Begin a pass, or go on with the one whose state was loaded."""
        is_loaded, self._is_loaded = self._is_loaded, False
        if not is_loaded:
            self._read, self._rest = 0, np.empty(0, np.int64)
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(self._passes)
        return iter(self._documents) if self._has_state else islice(iter(self._documents), self._read, None)

    def _ids(self, document: Any) -> StreamIds:
        if isinstance(document, Mapping):
            if self._field not in document:
                raise UsageError(f"document {self._read} has no {self._field!r}; say field=…: {', '.join(document)}")
            document = document[self._field]
        given = self._encode(document) if isinstance(document, str) else document
        ids = np.asarray(list(given) if isinstance(given, bytes) else given)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(f"document {self._read} is neither a text nor ids in a row: {quoted(document)}")
        return np.concatenate([ids.astype(np.int64), np.array(self._end, np.int64)])
