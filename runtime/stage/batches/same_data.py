"""Comparison of whole batches between the ranks of one replica, in some steps.

    replica 0    rank 0 (tp=0): inputs a, targets b ─┐
                 rank 1 (tp=1): inputs a, targets c ─┴▶ one minimum over all ranks ─▶ targets differ, on every rank

Sequences are compared whole, before they are sharded over cp. Each rank compares all data that it has. Inputs and
targets that it does not need may be missing, or placeholders (see `batch_digests`). Steps 0, 1, 2, 4, 8, … of each mode
are compared in this way; every training step by marks (`batch_digests`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ...blocks.trees import flatten
from ...comm import Group, ReduceOp
from ...comm.host_collectives import share_bytes
from .batch_digests import ADVICE
from .tree_digests import structure_of

_COLUMNS = 16
_NOTHING = 2**63 - 1


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
        whole = [given.get("inputs"), given.get("targets"), ", ".join(names) or "nothing"]
        beside: list[Any] = [extras[name] for name in names]
        if len(beside) > _COLUMNS - len(whole):
            beside = [*beside[: _COLUMNS - len(whole) - 1], beside[_COLUMNS - len(whole) - 1 :]]
        mine = [_NOTHING if tree is None else fingerprint(tree) for tree in whole] + list(map(fingerprint, beside))
        mine += [_NOTHING] * (_COLUMNS - len(mine))
        found = torch.full((2, self._num_replicas, _COLUMNS), _NOTHING)
        found[0, self._replica] = torch.tensor(mine)
        found[1, self._replica] = torch.tensor([_NOTHING if word == _NOTHING else -word for word in mine])
        found = found.to(self._world.device)
        self._world.all_reduce(found, ReduceOp.MIN).wait()
        low, high = found.cpu()
        differs = (low != -high) & (low != _NOTHING)
        if differs.any():
            replica, column = (int(place) for place in differs.nonzero()[0])
            what = ["inputs", "targets", "names of extras", *(f"{name!r}" for name in names)]
            self._refuse(replica, what[column] if column < len(what) else "extras", mine[column])

    def _refuse(self, replica: int, what: str, mine: int) -> None:
        """Raise an error that names two ranks that differ; all ranks take part, and the first one names the data."""
        sent = f"{self._replica} {mine} {what}".encode()
        all_said = [said.decode().split(" ", 2) for said in share_bytes(self._world, sent)]
        ranks = [(rank, s) for rank, s in enumerate(all_said) if s[0] == str(replica) and s[1] != str(_NOTHING)]
        first, said = ranks[0]
        other = next(rank for rank, s in ranks if s[1] != said[1])
        raise MisfitError(
            f"ranks {first} and {other} are given different {said[2]}, and belong to one replica ({replica} of "
            f"{self._num_replicas}): {ADVICE}"
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
