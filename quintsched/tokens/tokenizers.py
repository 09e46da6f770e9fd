"""Tokenizers of text, and the documents of text files.

bytes               each byte of UTF-8 is an id; 0, which no text has, ends a document; a vocabulary of 256
a name, a folder    transformers' AutoTokenizer; its end-of-sequence token, if it has one, ends a document

FILE.jsonl          a document per line: the text under "text", or another field
any other file      one document
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quintsched.errors import InputError, UsageError, quoted
from quintsched.files.read_plain_files_only import reading
from quintsched.files.strictjson import parse_strict

BYTES_TOKENIZER = "bytes"
BATCH = 256
"""Documents that a tokenizer is given at a time."""

LINES = ".jsonl"

TokenIds = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer: its name, the number of its ids, the id that ends a document, and texts → ids of each."""

    name: str
    vocabulary: int
    end: int | None
    encode: Callable[[Sequence[bytes]], Iterable[TokenIds]]

    def encoded(self, documents: Iterable[bytes]) -> Iterator[TokenIds]:
        """Yield the ids of each document, without its end."""
        rest = iter(documents)
        while batch := list(islice(rest, BATCH)):
            yield from self.encode(batch)


def find_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", or one of transformers, by its name or folder.

    Raises `UsageError` where transformers is missing, or has no such tokenizer.
    """
    if name == BYTES_TOKENIZER:
        return Tokenizer(BYTES_TOKENIZER, 256, 0, lambda texts: [np.frombuffer(text, dtype=np.uint8) for text in texts])
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise UsageError(
            f"--tokenizer {name}: tokenizers other than {BYTES_TOKENIZER!r} come with transformers, which is not "
            "installed; pip install transformers"
        ) from None
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"--tokenizer {name}: transformers finds no such tokenizer: {reason}") from None
    return tokenizer_of(found, Path(name).name if Path(name).is_dir() else name)


def tokenizer_of(found: Any, name: str) -> Tokenizer:
    """Return a tokenizer of transformers under a name."""

    def encode(texts: Sequence[bytes]) -> Iterator[TokenIds]:
        made = found([text.decode("utf-8") for text in texts], add_special_tokens=False, verbose=False)
        return (np.asarray(ids, dtype=np.int64) for ids in made["input_ids"])

    return Tokenizer(name, len(found), found.eos_token_id, encode)


def documents_of(paths: Iterable[Path], field: str = "text") -> Iterator[bytes]:
    """Yield the documents of text files, as UTF-8.

    Raises `InputError` with the place for a file that cannot be read, or is no text.
    """
    for path in paths:
        with reading(path, "the text"):
            if path.suffix == LINES:
                yield from _lines(path, field)
            else:
                yield _text(path.read_bytes(), str(path))


def _lines(path: Path, field: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                found = parse_strict(line.rstrip())
            except InputError as error:
                raise InputError(f"{where}: {str(error).replace(' at line 1, ', ' at ')}") from None
            text = found.get(field) if isinstance(found, dict) else None
            if not isinstance(text, str):
                raise InputError(f"{where}: it has no text under {quoted(field)}; name another one with --field")
            try:
                yield text.encode()
            except UnicodeEncodeError:
                raise InputError(f"{where}: {quoted(field)} is no text: a lone surrogate") from None


def _text(content: bytes, where: str) -> bytes:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text: byte {error.start} cannot be read") from None
    return content
