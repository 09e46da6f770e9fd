"""What the ranks of a run say to each other between steps; every rank makes the same calls in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quintsched import errors
from quintsched.errors import QuintschedError

from . import Group, ReduceOp

_LONGEST = 2000
"""Bytes of words that go from one rank to all."""


def first_said(mine: str, world: Group) -> str:
    """Return, on all ranks, the words of the first rank that has some; empty: none has."""
    first = torch.tensor([float(world.index if mine else world.size)], device=world.device)
    world.all_reduce(first, ReduceOp.MIN).wait()
    if first == world.size:
        return ""
    text = mine.encode()[:_LONGEST]
    sent = torch.tensor([*text, *[0] * (_LONGEST - len(text))], dtype=torch.uint8, device=world.device)
    world.broadcast(sent, int(first)).wait()
    return bytes(sent.tolist()).rstrip(b"\0").decode(errors="ignore")


Result = TypeVar("Result")
MOST_WORDS = 4000
"""Bytes of an error's message that other ranks are told."""


def gather_texts(group: Group, text: str) -> list[str]:
    """Return the texts of all members of a group, in their order."""
    mine = text.encode()
    sizes = torch.zeros(group.size, dtype=torch.int64, device=group.device)
    group.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device=group.device)).wait()
    lengths = sizes.tolist()
    longest = max(1, *lengths)
    sent = torch.tensor([*mine, *[0] * (longest - len(mine))], dtype=torch.uint8, device=group.device)
    gathered = sent.new_empty((group.size * longest,))
    group.all_gather(gathered, sent).wait()
    rows = gathered.cpu().split(longest)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


class ControlGroup:
    """All ranks of a run, as one of them asks and answers."""

    def __init__(self, world: Group) -> None:
        self._world = world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._world.index == 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
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
        sent = torch.tensor([number], dtype=torch.int64, device=self._world.device)
        self._world.broadcast(sent, 0).wait()
        return int(sent.item())

    def draw_id(self) -> int:
        """Return a number below 2^56 that no two runs have, the same on every rank; no generator is drawn from."""
        return self.first_says(int.from_bytes(os.urandom(7)))

    def share_bytes(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, of whatever length, in the order of ranks."""
        return share_bytes(self._world, mine)

    def together(self, work: Callable[[], Result]) -> Result:
        """Return what this rank makes; where some rank fails, all raise what the first of them does."""
        error: QuintschedError | None = None
        made: list[Result] = []
        try:
            made.append(work())
        except QuintschedError as failed:
            error = failed
        mine = b"" if error is None else f"{type(error).__name__}:{error}".encode()[:MOST_WORDS]
        for rank, theirs in enumerate(self.share_bytes(mine)):
            if theirs and error is not None and rank == self._world.index:
                raise error
            if theirs:
                kind, _, words = theirs.decode(errors="replace").partition(":")
                raise getattr(errors, kind)(words)
        return made[0]


def share_bytes(group: Group, mine: bytes) -> list[bytes]:
    """Return every member's bytes, of whatever length, in the order of the group; all members call this."""
    device = group.device
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    group.all_gather(lengths, torch.tensor([len(mine)], device=device)).wait()
    sizes: list[int] = lengths.tolist()
    longest = max(sizes)
    if not longest:
        return [b""] * group.size
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = _as_tensor(mine)
    gathered = torch.empty(group.size * longest, dtype=torch.uint8, device=device)
    group.all_gather(gathered, padded.to(device)).wait()
    return [row.cpu().numpy().tobytes()[:size] for row, size in zip(gathered.split(longest), sizes, strict=True)]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
