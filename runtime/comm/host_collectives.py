"""Small collectives of host data (bytes, texts, numbers) over a group; all ranks make the same calls in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import torch
from torch import Tensor

from quintsched import errors
from quintsched.errors import MisfitError, QuintschedError, listed_ranks

from . import Group, ReduceOp

Result = TypeVar("Result")
MOST_ERROR_BYTES = 4000
"""Number of bytes of an error's message that other ranks receive."""
CALLS = (
    *("none of them", "step", "evaluate or run", "full_state_dict", "save_dcp", "save_pretrained"),
    *("load_state_files", "load_pretrained", "load_dcp"),
)
"""Methods of an engine that all ranks call alike, by the number in a rank's wait cell of the one called last."""
SAME_CALLS = "let all ranks make the same calls, in the same order"


def share_bytes(group: Group, mine: bytes) -> list[bytes]:
    """Return every member's bytes, of any length, in the order of the group (all-gather).

    Raises `MisfitError`, on all members, where they meet here from unlike calls of their engine's methods.
    """
    device = group.device
    heads = torch.empty(group.size, 2, dtype=torch.int64, device=device)
    group.all_gather(heads, torch.tensor([[len(mine), group.wait_cell.call]], device=device)).wait()
    sizes, calls = heads.t().tolist()
    if len({*calls}) > 1:
        members = {call: [r for r, its in zip(group.ranks, calls, strict=True) if its == call] for call in calls}
        named = [f"{listed_ranks(ranks)} called {CALLS[call]}" for call, ranks in members.items()]
        raise MisfitError(f"the ranks call unlike methods of their engine: {', '.join(named)}; {SAME_CALLS}")
    longest = max(sizes)
    if not longest:
        return [b""] * len(sizes)
    gathered = torch.empty(len(sizes) * longest, dtype=torch.uint8, device=device)
    group.all_gather(gathered, _as_tensor(mine, longest).to(device)).wait()
    whole = gathered.cpu().numpy().tobytes()
    return [whole[k * longest : k * longest + size] for k, size in enumerate(sizes)]


def share_texts(group: Group, mine: str) -> list[str]:
    """Return every member's text, in the order of the group (all-gather)."""
    return [said.decode() for said in share_bytes(group, mine.encode())]


def first_said(mine: str, group: Group) -> str:
    """Return, on all members, the first non-empty text, up to `MOST_ERROR_BYTES` bytes; "": all are empty."""
    return next(filter(None, share_bytes(group, mine.encode()[:MOST_ERROR_BYTES])), b"").decode(errors="ignore")


def broadcast_bytes(group: Group, mine: bytes, source: int) -> bytes:
    """Return the bytes of the member at index `source`; those of the others are ignored."""
    length = torch.tensor([len(mine)], dtype=torch.int64, device=group.device)
    group.broadcast(length, source).wait()
    size = int(length)
    sent = _as_tensor(mine[:size], max(size, 1)).to(group.device)
    group.broadcast(sent, source).wait()
    return sent.cpu().numpy().tobytes()[:size]


def reduce_numbers(group: Group, numbers: Sequence[float], op: ReduceOp = ReduceOp.MAX) -> list[float]:
    """Return each of the numbers reduced over the members, as float64: by default their maximum."""
    found = torch.tensor(numbers, dtype=torch.float64, device=group.device)
    group.all_reduce(found, op).wait()
    of_all: list[float] = found.tolist()
    return of_all


def is_same(group: Group, words: str) -> bool:
    """Whether all members pass the same words, by one all-reduce of a digest."""
    mark = int.from_bytes(blake2b(words.encode(), digest_size=7).digest())
    extremes = torch.tensor([mark, -mark], dtype=torch.int64).to(group.device, non_blocking=True)
    group.all_reduce(extremes, ReduceOp.MAX).wait()
    most, least = extremes.tolist()
    return bool(most == -least)


class ControlGroup:
    """Control collectives over all ranks of a run."""

    def __init__(self, world: Group) -> None:
        self._world = world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._world.index == 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.add_numbers(0)

    def add_numbers(self, *numbers: float) -> list[float]:
        """Return the sums of the numbers over all ranks."""
        return reduce_numbers(self._world, numbers, ReduceOp.SUM)

    def first_says(self, number: int) -> int:
        """Return rank 0's number on every rank."""
        return int(broadcast_bytes(self._world, str(number).encode(), 0))

    def draw_id(self) -> int:
        """Return a unique id below 2^56 for the run, the same on every rank; drawn from the system, not a generator."""
        return self.first_says(int.from_bytes(os.urandom(7)))

    def share_bytes(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, of any length, in the order of ranks."""
        return share_bytes(self._world, mine)

    def together(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` on this rank; if it fails on some rank, all raise the first rank's error."""
        error: QuintschedError | None = None
        made: list[Result] = []
        try:
            made.append(work())
        except QuintschedError as failed:
            error = failed
        known = [kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__)]
        mine = b"" if error is None else f"{known[0]}:{error}".encode()[:MOST_ERROR_BYTES]
        for rank, theirs in enumerate(self.share_bytes(mine)):
            if theirs:
                kind, _, words = theirs.decode(errors="replace").partition(":")
                raise error if error is not None and rank == self._world.index else getattr(errors, kind)(words)
        return made[0]


def _as_tensor(data: bytes, length: int) -> Tensor:
    """Return bytes as a tensor, zero-padded to a length."""
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
