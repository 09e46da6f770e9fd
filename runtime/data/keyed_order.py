"""Keyed permutations of range(size): the order of samples as a function, never as a list.

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

import numpy as np
import numpy.typing as npt

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
