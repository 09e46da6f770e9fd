"""Digests of 64 bits of trees of tensors: structure, plain values, shapes, dtypes and numbers.

    up to 256 KiB   all numbers        bits, as 64-bit integers x_i:  Σ w_i (x_i ^ x_i >> 29)  mod 2^64
    more            256 scattered numbers, and 256 KiB of adjacent ones, others each time

Integer sums do not depend on order, so the same data have the same digest on any device and machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from ...blocks.trees import Branch, Leaf, Node, TensorSlot, Tree
from ...comm.checked.message_frame import describe_spec
from ...data.same_data_on_resume import scattered

DigestNumber = int | Tensor
"""An int, or a 0-dimensional int64 tensor on the data's device, so that the host need not wait for it."""

_WHOLE_BYTES = 2**18
_SCATTERED = 256
_BITS = 64
_ODD = 0x9E3779B97F4A7C15
_ALL_BITS = 2**_BITS - 1
_AT_ONCE, _SHIFT = 64, np.array(29)
_NO_WORDS = np.empty(0, np.int64)
_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8))


def structure_of(tree: Tree, tensors: Sequence[Tensor]) -> str:
    """Return the structure of a tree, with its plain values, and the dtypes and shapes of its tensors, in words."""
    if tree.root is TensorSlot.TENSOR:
        return _tensor_words(tensors[0].dtype, tensors[0].shape)
    return _words(tree.root, iter(tensors))


def digest(words: str, samples: Sequence[Tensor]) -> DigestNumber:
    """Return the digest of a structure and of samples, (n,) each: an int below 2^64, or a tensor of the same bits."""
    total: DigestNumber = _digest_words(words)
    for numbers in samples:
        found = _digest(numbers)
        both_here = type(total) is type(found) is int
        total = (total * _ODD + found) & _ALL_BITS if both_here else _joined_on_device(total, found)
    return total


def top_bits(number: DigestNumber, count: int) -> DigestNumber:
    """Return the highest bits of a digest."""
    found: DigestNumber = (number >> (_BITS - count)) & (2**count - 1)
    return found


def samples_of(tensor: Tensor, turn: int = 0) -> list[Tensor] | None:
    """Return all numbers of a small tensor; of a large one scattered and adjacent samples: each contiguous.

    None: its memory cannot be read, as on the meta device.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.nbytes <= _WHOLE_BYTES:
        return [tensor if tensor.is_contiguous() else tensor.contiguous()]
    return [_scattered(tensor), _neighbours(tensor, _WHOLE_BYTES // tensor.itemsize, turn).contiguous().view(-1)]


def differ(samples: Sequence[Tensor]) -> DigestNumber:
    """Return whether any sample has unequal numbers: 1 or 0, as a tensor on an accelerator."""
    found = []
    for numbers in samples:
        if numbers.device.type != "cpu":
            found.append((numbers != numbers.view(-1)[0]).any())
        else:
            for some in (numbers.view(-1)[:_AT_ONCE], numbers.view(-1)):
                raw = some.view(torch.uint8).numpy().tobytes()
                if raw != raw[: some.itemsize] * (len(raw) // some.itemsize):
                    return 1
    return torch.stack(found).any().to(torch.int64) if found else 0


_tensor_words = lru_cache(maxsize=1024)(describe_spec)


def _words(node: Node, tensors: Iterator[Tensor]) -> str:
    if node is TensorSlot.TENSOR:
        tensor = next(tensors)
        return _tensor_words(tensor.dtype, tensor.shape)
    if isinstance(node, Leaf):
        return _leaf_words(node)
    assert isinstance(node, Branch)
    children = [_words(child, tensors) for child in node.children]
    named = map("{}: {}".format, node.keys, children) if node.keys else children
    return f"{node.kind.__name__}({', '.join(named)})"


def _leaf_words(leaf: Leaf) -> str:
    """Return a plain value in a form that is the same in all processes; the type's name for any other value."""
    value = leaf.value
    if not leaf.is_plain or isinstance(value, torch.device):
        return f"a {type(value).__name__}"
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(repr, value))})"
    text = repr(value)
    return f"a {type(value).__name__}" if " at 0x" in text else text


@lru_cache(maxsize=1024)
def _digest_words(words: str) -> int:
    return int.from_bytes(hashlib.blake2b(words.encode(errors="replace"), digest_size=8).digest(), "little")


def _joined_on_device(before: DigestNumber, now: DigestNumber) -> DigestNumber:
    """Combine two digests into one, order-dependent, modulo 2^64."""
    rotated = before * _signed(_ODD) if isinstance(before, Tensor) else _signed(before * _ODD)
    return rotated + (_signed(now) if isinstance(now, int) else now)


def _signed(number: int) -> int:
    """Return the int64 number with the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _scattered(tensor: Tensor) -> Tensor:
    """Return numbers from all parts of a tensor: (n,)."""
    places = _places(tensor.shape, tensor.device, is_flat=tensor.is_contiguous())
    return tensor.view(-1).index_select(0, places[0]) if len(places) == 1 else tensor[places]


@lru_cache(maxsize=256)
def _places(shape: tuple[int, ...], device: torch.device, *, is_flat: bool) -> tuple[Tensor, ...]:
    flat = scattered(prod(shape), _SCATTERED)
    places = (flat,) if is_flat else np.unravel_index(flat, shape)
    return tuple([torch.from_numpy(place).to(device) for place in places])


def _neighbours(tensor: Tensor, most: int, turn: int) -> Tensor:
    """Return whole adjacent rows of a tensor, at most `most` numbers; where one row has more, a part of one."""
    while tensor.numel() > most:
        rows = min(len(tensor), most * len(tensor) // tensor.numel())
        if rows:
            start = min(turn % -(-len(tensor) // rows) * rows, len(tensor) - rows)
            return tensor[start : start + rows]
        turn, row = divmod(turn, len(tensor))
        tensor = tensor[row]
    return tensor


def _digest(numbers: Tensor) -> DigestNumber:
    """Return the weighted sum over the bits of contiguous numbers."""
    if not numbers.is_cpu:
        return digest_on_device(numbers.view(-1))
    raw = numbers.numpy() if numbers.dtype in _OF_NUMPY else numbers.view(-1).view(torch.uint8).numpy()
    rest = 0
    if raw.nbytes % 8:
        raw = raw.reshape(-1).view(np.uint8)
        whole = raw.size & ~7
        raw, rest = raw[:whole], int.from_bytes(raw[whole:].tobytes(), "little") * _ODD
    words = np.frombuffer(raw, np.int64) if raw.size else _NO_WORDS
    mixed = np.right_shift(words, _SHIFT)
    np.bitwise_xor(mixed, words, mixed)
    found: int = (int(mixed.dot(_weights_of(words.size))) + rest) & _ALL_BITS
    return found


def digest_on_device(numbers: Tensor) -> Tensor:
    """Return the same sum, computed on the numbers' device: 0-dimensional, int64."""
    if numbers.storage_offset() * numbers.itemsize % 8:
        numbers = numbers.clone()
    raw = numbers.view(torch.uint8)
    whole = raw.numel() & ~7
    words = raw[:whole].view(torch.int64)
    sums = ((words ^ (words >> 29)) * _weights_on(numbers.device)[: words.numel()]).sum()
    if whole < raw.numel():
        shifts = torch.arange(0, 8 * (raw.numel() - whole), 8, device=numbers.device)
        sums = sums + (raw[whole:].to(torch.int64) << shifts).sum() * _signed(_ODD)
    return sums


@lru_cache(maxsize=1)
def _weights() -> np.ndarray:
    """Return the weight of each 64-bit integer: splitmix64's sequence, int64."""
    with np.errstate(over="ignore"):
        state = np.arange(1, _WHOLE_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(_ODD)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (state ^ (state >> np.uint64(31))).view(np.int64)


@lru_cache(maxsize=256)
def _weights_of(count: int) -> np.ndarray:
    return _weights()[:count]


@lru_cache(maxsize=16)
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_weights()).to(device)
