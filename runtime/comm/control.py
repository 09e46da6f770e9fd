"""What the ranks of a run say to each other between steps; every rank makes the same calls in the same order."""

from __future__ import annotations

import torch

from . import Group


class Everyone:
    """All ranks of a run, seen from one of them."""

    def __init__(self, world: Group) -> None:
        self._world = world

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        flag = torch.zeros(1, device=self._world.device)
        self._world.all_reduce(flag).wait()
        flag.item()

    def add(self, *numbers: float) -> list[float]:
        """Return the sums of everybody's numbers."""
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._world.device)
        self._world.all_reduce(sums).wait()
        found: list[float] = sums.tolist()
        return found

    def first_says(self, number: int) -> int:
        """Return rank 0's number on every rank."""
        told = torch.tensor([number], dtype=torch.int64, device=self._world.device)
        self._world.broadcast(told, 0).wait()
        return int(told.item())

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return every rank's bytes, all of the same length, in the order of ranks."""
        mine = torch.tensor(list(own), dtype=torch.uint8, device=self._world.device)
        everyone = mine.new_empty((self._world.size * len(own),))
        self._world.all_gather(everyone, mine).wait()
        return [bytes(part.tolist()) for part in everyone.split(len(own))]
