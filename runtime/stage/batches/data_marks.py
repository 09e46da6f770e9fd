"""The same data in every step: what each rank is given leaves a mark, which rides along with the gradient's norm.

    rank      inputs ─▶ 256 numbers of them ─▶ mark h < 2^20      one for inputs, for targets, for extras
    step end  1, h, h² per replica, summed with the norm's square over the model's ranks: no message more
    then      n Σh² = (Σh)² if and only if all n marks are equal (Cauchy and Schwarz), in whole numbers

It is known before the optimizer steps. What a rank is not given, and need not be, leaves no mark; nor does what it does
not need where all numbers are one, which only keeps the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ...blocks.trees import flatten

KINDS = ("inputs", "targets", "extras")

_WIDTH = 3 * len(KINDS)
_SAMPLED = 256
_MODULUS = 2**20
_MOST_SLOTS = 64
"""So many replicas are compared in one step; where there are more, they take turns."""


Mark = int | Tensor
"""An int, or 0-dimensional, int64, on the device of what it is of, which nobody waits for."""


class DataMarks:
    """The marks of one rank's steps, and what becomes of those of all.

    Args:
        ranks: those that the sums run over.
        replica_of: rank → the replica that it belongs to.
        rank: this one.
        device: where the sums are found.
    """

    def __init__(self, ranks: Sequence[int], replica_of: Callable[[int], int], rank: int, device: torch.device) -> None:
        self._device = device
        members: dict[int, list[int]] = {}
        for other in ranks:
            members.setdefault(replica_of(other), []).append(other)
        self._members = list(members.values())
        self._mine = list(members).index(replica_of(rank))
        self._turns = -(-len(members) // _MOST_SLOTS)
        self._slots = -(-len(members) // self._turns)
        self._compares = max(map(len, self._members)) > 1
        self._nothing = torch.zeros(self._slots * _WIDTH, dtype=torch.float64, device=device)
        self._marks: list[Mark | None] | None = None
        self._turn = 0

    def note(self, given: Mapping[str, Any], needed: Mapping[str, bool], extras: Mapping[str, Any]) -> None:
        """Take in what this rank is given for a step, or for one more batch of it.

        `given` and `needed` have "inputs" and "targets".
        """
        if not self._compares:
            return
        trees = [given["inputs"], given["targets"], [extras[name] for name in sorted(extras)] or None]
        needs = [needed["inputs"], needed["targets"], True]
        found = [mark_of(tree, is_needed=needs) for tree, needs in zip(trees, needs, strict=True)]
        if self._marks is not None:
            found = [_folded(before, now) for before, now in zip(self._marks, found, strict=True)]
        self._marks = found

    def take(self) -> Tensor | None:
        """Return the step's numbers, to be summed over the ranks: float64, one row; None where none are compared."""
        marks, self._marks = self._marks, None
        if not self._compares:
            return None
        self._turn = (self._turn + 1) % self._turns
        slot, turn = divmod(self._mine, self._turns)
        if turn != self._turn or marks is None or all(mark is None for mark in marks):
            return self._nothing
        row: list[Mark] = [0] * (self._slots * _WIDTH)
        for kind, mark in enumerate(marks):
            if mark is not None:
                at = slot * _WIDTH + 3 * kind
                row[at : at + 3] = 1, mark, mark * mark
        on_host = [0 if isinstance(number, Tensor) else number for number in row]
        table = torch.tensor(on_host, dtype=torch.float64).to(self._device, non_blocking=True)
        for at, number in enumerate(row):
            if isinstance(number, Tensor):
                table[at] = number
        return table

    def require_equal(self, sums: Sequence[float]) -> None:
        """Raise `MisfitError`, on all ranks that the sums ran over, where ranks of a replica were given other data."""
        for at in range(0, len(sums), 3):
            count, total, squares = sums[at : at + 3]
            if int(count) * int(squares) != int(total) ** 2:
                slot, place = divmod(at, _WIDTH)
                ranks, what = self._members[slot * self._turns + self._turn], KINDS[place // 3]
                named = ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
                raise MisfitError(
                    f"ranks {named} belong to one replica, but were not all given the same {what} in this step, "
                    "which changed no weights: give all ranks of a replica the same samples in the same order, chosen "
                    "by engine.replica and engine.num_replicas alone (a loader that shuffles needs a generator or "
                    "sampler with a seed of its own, the same on all of them)"
                )


def mark_of(tree: Any, *, is_needed: bool) -> Mark | None:
    """Return a number below 2^20 that says what a tree of tensors is; None: it says nothing."""
    if tree is None:
        return None
    samples = [_sample(tensor) for tensor in flatten(tree)[1] if tensor.numel()]
    if not samples or not (is_needed or any(bool((sample != sample[0]).any()) for sample in samples)):
        return None
    found: Mark = 0
    for sample in samples:
        mark = _mark_of(sample)
        found = (found * 31 + mark) % _MODULUS
    return found


def is_place_holder(tree: Any) -> bool:
    """Whether all numbers of each tensor are one: what only keeps the place of data that a rank does not need."""
    _, tensors = flatten(tree)
    return all(not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all()) for tensor in tensors)


def _folded(before: Mark | None, now: Mark | None) -> Mark | None:
    return None if before is None or now is None else (before * 31 + now) % _MODULUS


def _sample(tensor: Tensor) -> Tensor:
    """Return some numbers of a tensor, from all over it, in memory of their own: (n,)."""
    flat = tensor.detach().reshape(-1)
    return flat.index_select(0, _places(flat.numel(), flat.device))


def _mark_of(sample: Tensor) -> Mark:
    raw = sample.view(torch.uint8)
    if raw.device.type == "cpu":
        return int(np.dot(raw.numpy(), _weights(raw.numel()))) % _MODULUS
    weights = torch.from_numpy(_weights(raw.numel())).to(raw.device, non_blocking=True)
    return (raw * weights).sum() % _MODULUS


@lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> Tensor:
    """Return which numbers of so many are looked at: all, or scattered ones, so that no pattern of rows is met."""
    if count <= _SAMPLED:
        return torch.arange(count, device=device)
    return torch.tensor([number * 0x9E3779B1 % count for number in range(_SAMPLED)], device=device)


@lru_cache(maxsize=256)
def _weights(count: int) -> np.ndarray:
    """Return what each byte weighs, (count,), int64."""
    return (np.arange(count, dtype=np.int64) * 40503 + 12345) % 65521 + 1
