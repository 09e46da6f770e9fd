"""Digests of batches (marks), by which a resumed run checks that its loader yields the same data again.

batch ─▶ numbers sampled over each tensor, copied to separate memory ─▶ at a save: path → digest
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

Sample = dict[str, Any]
"""Some numbers of each tensor of a batch, and its plain values, by their paths in it."""

SampleDigests = dict[str, list[int]]
"""Digest by path, as plain data; further entries in older marks are ignored."""

_SAMPLED, _LEAVES, _ENTRIES = 1024, 256, 64


def sample_of(given: Any) -> Sample:
    """Return a sample of a loader's batch, copied now; without synchronizing a device."""
    return dict(islice(_sampled(given, ""), _LEAVES))


def mark_of(sample: Sample) -> SampleDigests:
    """Return the mark of a sample."""
    return {path: [zlib.crc32(_bytes(numbers))] for path, numbers in sample.items()}


def is_marked(found: SampleDigests, before: SampleDigests) -> bool:
    """Whether two marks are equal at the paths that both have."""
    return all(found[path][0] == digest for path, (digest, *_) in before.items() if path in found)


def scattered(count: int, most: int) -> np.ndarray:
    """Return `most` indices scattered over `count` numbers, so that they match no pattern of rows: int64, (most,)."""
    return np.arange(most, dtype=np.int64) * 0x9E3779B1 % count


def _sampled(given: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Tensor):
        if given.layout is torch.strided and not given.is_nested and not given.is_meta:
            plain = given.detach().as_subclass(Tensor)
            yield path, plain.take(torch.from_numpy(_places(plain.numel())).to(plain.device)).resolve_conj()
    elif isinstance(given, np.ndarray):
        if not given.dtype.hasobject:
            yield path, given.flat[_places(given.size)]
    elif isinstance(given, str | bytes | int | float):
        yield path, given
    elif isinstance(given, Mapping | list | tuple):
        for name, part in islice(given.items() if isinstance(given, Mapping) else enumerate(given), _ENTRIES):
            yield from _sampled(part, f"{path}/{name}")


def _places(count: int) -> np.ndarray:
    return np.arange(count) if count <= _SAMPLED else scattered(count, _SAMPLED)


def _bytes(numbers: Any) -> bytes:
    if isinstance(numbers, Tensor):
        return numbers.cpu().view(torch.uint8).numpy().tobytes()
    return numbers.tobytes() if isinstance(numbers, np.ndarray) else repr(numbers).encode()
