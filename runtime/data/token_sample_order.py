"""Samples of a training on token shards: which window is the n-th sample, as a function of seed and n alone.

    sample n ─▶ source, and number of the draw of it ─▶ pass over the source, place in it ─▶ window

one source     draw n of it
a mixture      in each block of 10,000 samples, source s has 10,000 · its share of them, rounded; a keyed permutation of
               the block, by (seed, 1, block), says where

    block of 10     s0 s0 s0 s0 s0 s0 s0 s1 s1 s1      shares 0.7, 0.3
    permuted        s0 s1 s0 s0 s0 s1 s0 s0 s1 s0      draw of s0 in block b: 7 b + its number among them

Draw k of a source of L windows is in its pass k // L, which is a keyed permutation of all L by (seed, 2, source, pass);
so a source of few windows and a large share is passed over several times in an epoch. Nothing is remembered: a run goes
on at any sample, on any mesh.

Keyed permutations of range(size): the order of samples as a function, never as a list.

A Feistel network over 2k bits, the fewest that hold `size`, permutes range(4^k); a number that falls behind `size` is
permuted again until it falls within (cycle walking), which permutes range(size).

    left, right = number >> k, number & (2^k - 1)
    8 rounds r:   left, right = right, left ^ (mix(right + key_r) & (2^k - 1))

    mix       finalizer of splitmix64
    key_r     mix(h + r · G), where h = 0, and then h = mix(h ^ (word + G)) for each word of the key; G is the golden
              ratio in 64 bits, 0x9E3779B97F4A7C15

All arithmetic is modulo 2^64, so that every release and machine has the same order.

Sources: Luby & Rackoff 1988, "How to Construct Pseudorandom Permutations"; Black & Rogaway 2002, "Ciphers with
Arbitrary Finite Domains" (cycle walking); Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .fixed_length_token_samples import BatchRows, Windows, real_rows
from .memory_dataset import DataSpec, Indices

MIXTURE_BLOCK = 10_000
"""Samples in which the shares of a mixture are exact."""

DOCUMENT_IDS = "document_ids"
"""Extra with the number of each token's document, for blocks that keep attention within it."""

_OF_MIXTURE, _OF_SOURCE = 1, 2
"""First word of a key behind the seed."""


@dataclass(frozen=True, eq=False)
class WindowSource:
    """Windows number `first` to `first + count - 1` of some shards, and how many of a block's samples are of them."""

    windows: Windows
    first: int
    count: int
    of_block: int = MIXTURE_BLOCK


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Samples of several sources; `len` is their number in an epoch.

    Attributes:
        sources: the sources.
        size: number of samples of an epoch.
        shuffled: whether they are drawn by shares and shuffled; else all sources one after the other.
        documents: whether documents are kept apart, by the extra `document_ids`.
    """

    sources: tuple[WindowSource, ...]
    size: int
    shuffled: bool
    documents: bool

    def __len__(self) -> int:
        return self.size

    def digest(self) -> str:
        """Return a digest (16 digits) of the shards' content and of all that the samples depend on besides the seed."""
        digest = hashlib.sha256(f"{self.size} {self.shuffled} {self.documents}".encode())
        for source in self.sources:
            windows = source.windows
            said = type(windows).__name__, windows.sequence, source.first, source.count, source.of_block
            digest.update(f"{windows.folder.digest()} {said}".encode())
        return digest.hexdigest()[:16]

    def batch(
        self, indices: Indices, epoch: int = 0, seed: int = 0, *, ids: bool = True
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        """Return inputs and targets, int64 (B, sequence), and extras of the samples at `indices` (B,) of an epoch.

        Rows of PADDING are zeros with ignored targets. Without `ids`, for a rank that needs no tokens, inputs and
        targets are None, and only ends of documents are read.
        Raises `InputError`, with the place, for ids that are not in the vocabulary.
        """
        shards, sequence = self.sources[0].windows.folder, self.sources[0].windows.sequence
        dtype = shards.index.numbers if ids else None
        into = BatchRows.of_padding(len(indices), sequence, dtype=dtype, apart=self.documents)
        rows = real_rows(indices)
        owners, windows = self.windows(indices[rows] + epoch * self.size if self.shuffled else indices[rows], seed)
        for number in np.unique(owners):
            mine = owners == number
            source = self.sources[number]
            source.windows.read_windows(windows[mine] + source.first, into, rows[mine])
        inputs, targets, documents = (None if part is None else torch.from_numpy(part) for part in into.samples())
        return inputs, targets, {} if documents is None else {DOCUMENT_IDS: documents}

    def windows(self, samples: Indices, seed: int) -> tuple[Indices, Indices]:
        """Return the source of each sample (B,), and the window of it, from 0."""
        if not self.shuffled:
            before = np.cumsum([0, *(source.count for source in self.sources)])
            owners = np.searchsorted(before, samples, side="right") - 1
            return owners, samples - before[owners]
        owners, draws = self._draws(samples, seed)
        windows = np.empty_like(draws)
        for number in np.unique(owners):
            mine, count = owners == number, self.sources[number].count
            windows[mine] = _permuted_by_round(draws[mine], count, seed, _OF_SOURCE, int(number))
        return owners, windows

    def _draws(self, samples: Indices, seed: int) -> tuple[Indices, Indices]:
        """Return the source of each sample, and how many draws of it come before."""
        if len(self.sources) == 1:
            return np.zeros_like(samples), samples
        shares = np.array([source.of_block for source in self.sources])
        before = np.cumsum([0, *shares])
        places = _permuted_by_round(samples, MIXTURE_BLOCK, seed, _OF_MIXTURE)
        owners = np.searchsorted(before, places, side="right") - 1
        return owners, samples // MIXTURE_BLOCK * shares[owners] + places - before[owners]


def shares_of(weights: Sequence[float]) -> list[int]:
    """Return how many samples of a block each source has, BLOCK together; the largest remainders are rounded up."""
    exact = np.array(weights) / sum(weights) * MIXTURE_BLOCK
    shares = np.floor(exact).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")
    shares[order[: MIXTURE_BLOCK - int(shares.sum())]] += 1
    return [int(share) for share in shares]


def _permuted_by_round(numbers: Indices, size: int, *key: int) -> Indices:
    """Return the places of numbers in their rounds of `size`, each of which is permuted by the key and its number."""
    rounds, places = np.divmod(numbers, size)
    found = np.empty_like(places)
    for number in np.unique(rounds):
        mine = rounds == number
        found[mine] = permuted(places[mine], size, *key, int(number))
    return found


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Samples of token shards for training and for validation.

    Attributes:
        train, validation: the samples.
        spec: sizes that a model is built for: sequences, and the vocabulary.
        prefetch: number of batches that are read ahead.
    """

    train: TokenSamples
    validation: TokenSamples
    spec: DataSpec
    prefetch: int

    @property
    def num_classes(self) -> int:
        """Number of ids of the vocabulary."""
        return self.spec.num_classes


GOLDEN = 0x9E3779B97F4A7C15
CIPHER_ROUNDS = 8
_MASK = 2**64 - 1

SampleNumbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def permuted(numbers: SampleNumbers, size: int, *key: int) -> SampleNumbers:
    """Return where `numbers`, int64 (…) in range(size), go under the permutation of a key: int64 (…)."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    found = _encrypted(numbers.astype(np.uint64), half, keys)
    while (outside := found >= np.uint64(size)).any():
        found[outside] = _encrypted(found[outside], half, keys)
    return found.astype(np.int64)


def _encrypted(numbers: Words, half: int, keys: Words) -> Words:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _round_keys(key: tuple[int, ...]) -> Words:
    chained = np.zeros(1, np.uint64)
    for word in key:
        chained = _mixed(chained ^ np.uint64((word + GOLDEN) & _MASK))
    return _mixed(chained + np.array([number * GOLDEN & _MASK for number in range(CIPHER_ROUNDS)], np.uint64))


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
