"""Marks of batches, by which a run that goes on sees whether its loader gives again what it gave before.

    batch ─▶ numbers from all over each tensor, kept in memory of their own ─▶ at a save: path → digest

What one of two runs had only to keep the place, all numbers of it one, says nothing of the other's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

Sample = dict[str, Any]
"""Some numbers of each tensor of a batch, by its path in it."""

Mark = dict[str, list[int]]
"""By path a digest, and whether all numbers were one, as plain data."""

_SAMPLED, _LEAVES, _ENTRIES = 1024, 256, 64


def sample_of(given: Any) -> Sample:
    """Return some of what a loader gave, as it is now; on a device nothing waits for it."""
    return dict(islice(_sampled(given, ""), _LEAVES))


def mark_of(sample: Sample) -> Mark:
    """Return the mark of what was sampled."""
    return {path: _digest(numbers) for path, numbers in sample.items()}


def is_marked(found: Mark, before: Mark) -> bool:
    """Whether a mark says the same as another one, as far as both say something."""
    both = [(found[path], before[path]) for path in before if path in found]
    return all(mine == theirs or mine[1] != theirs[1] for mine, theirs in both)


def _sampled(given: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Tensor):
        if given.layout is torch.strided and not given.is_nested and not given.is_meta and given.numel():
            plain = given.detach().as_subclass(Tensor)
            yield path, plain.take(_places(plain.numel(), plain.device)).resolve_conj()
    elif isinstance(given, np.ndarray):
        if given.size and not given.dtype.hasobject:
            yield path, given.flat[_places(given.size, torch.device("cpu")).numpy()]
    elif isinstance(given, str | bytes | int | float):
        yield path, given
    elif isinstance(given, Mapping):
        for name, part in islice(given.items(), _ENTRIES):
            yield from _sampled(part, f"{path}/{name}")
    elif isinstance(given, list | tuple):
        for at, part in enumerate(given[:_ENTRIES]):
            yield from _sampled(part, f"{path}/{at}")


@lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> Tensor:
    """Return which numbers of so many are looked at: all, or scattered ones."""
    if count <= _SAMPLED:
        return torch.arange(count, device=device)
    return torch.from_numpy(scattered(count, _SAMPLED)).to(device)


def scattered(count: int, most: int) -> np.ndarray:
    """Return `most` places from all over `count` numbers, so that no pattern of rows is met: int64, (most,)."""
    return np.arange(most, dtype=np.int64) * 0x9E3779B1 % count


def _digest(numbers: Any) -> list[int]:
    if isinstance(numbers, Tensor):
        numbers = numbers.cpu().view(torch.uint8).numpy().reshape(len(numbers), -1)
    elif isinstance(numbers, np.ndarray):
        numbers = np.frombuffer(numbers.tobytes(), dtype=np.uint8).reshape(len(numbers), -1)
    else:
        return [zlib.crc32(repr(numbers).encode()), 0]
    return [zlib.crc32(numbers.tobytes()), int((numbers == numbers[0]).all())]
