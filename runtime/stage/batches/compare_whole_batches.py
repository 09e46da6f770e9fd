"""Comparison of whole batches between the ranks of one replica, in some steps.

    replica 0    rank 0 (tp=0): inputs a, targets b ─┐
                 rank 1 (tp=1): inputs a, targets c ─┴▶ fingerprints of all ranks ─▶ targets differ, on every rank

Sequences are compared whole, before they are sharded over cp. Each rank compares all data that it has. Inputs and
targets that it does not need may be missing, or placeholders (see `same_batch_every_step`). Steps 0, 1, 2, 4, 8, … of
each mode are compared in this way; every training step by marks (`same_batch_every_step`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ...blocks.trees import flatten
from ...comm import Group
from ...comm.host_collectives import share_texts
from .same_batch_every_step import ADVICE
from .tree_digests import structure_of

_NAMES = "names of extras"


class SameData:
    """Compares the batches of the ranks of one replica.

    Args:
        replica, num_replicas: this rank's replica, and the number of replicas.
        world: all ranks.
    """

    def __init__(self, replica: int, num_replicas: int, world: Group) -> None:
        self._replica, self._num_replicas, self._world = replica, num_replicas, world
        self._steps: dict[str, int] = {}

    def is_due(self, mode: str) -> bool:
        """Whether the next step of a mode is compared; all ranks call this before each step."""
        done = self._steps.get(mode, 0)
        self._steps[mode] = done + 1
        return self._world.size > self._num_replicas and not done & (done - 1)

    def require(self, given: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """Raise `MisfitError`, on every rank, where ranks of one replica have different data (collective).

        Args:
            given: inputs and targets by these names; None: absent, or a placeholder.
            extras: data that every rank has.
        """
        names = sorted(extras)
        mine = {name: fingerprint(tree) for name, tree in given.items() if tree is not None}
        mine |= {_NAMES: fingerprint(names), **{f"{name!r}": fingerprint(extras[name]) for name in names}}
        told = list(map(json.loads, share_texts(self._world, json.dumps([self._replica, mine]))))
        for replica in range(self._num_replicas):
            members = {rank: its for rank, (number, its) in enumerate(told) if number == replica}
            for what in dict.fromkeys(["inputs", "targets", _NAMES, *chain.from_iterable(members.values())]):
                have = [(rank, its[what]) for rank, its in members.items() if what in its]
                other = next((rank for rank, mark in have if mark != have[0][1]), None)
                if other is not None:
                    raise MisfitError(
                        f"ranks {have[0][0]} and {other} are given different {what}, and belong to one replica "
                        f"({replica} of {self._num_replicas}): {ADVICE}"
                    )


def fingerprint(tree: Any) -> int:
    """Return a fingerprint of 62 bits of a tree: its structure, plain values, and all numbers."""
    built, tensors = flatten(tree)
    found = hashlib.blake2b(structure_of(built, tensors).encode(errors="replace"), digest_size=8)
    for tensor in tensors:
        found.update(_bytes_of(tensor))
    return int.from_bytes(found.digest(), "big") >> 2


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
