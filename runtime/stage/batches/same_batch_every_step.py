"""Batch digests that detect ranks with different data, in every step: marks piggybacked on the grad-norm all-reduce.

    rank      inputs ─▶ digest of structure, plain values, numbers ─▶ mark h < 2^20      also for targets, for extras
    step end  1, h, h² per replica, summed with the squared norm over the model's ranks: no extra message
    then      n Σh² = (Σh)² if and only if all n marks are equal (Cauchy-Schwarz), in integers
    if not    the ranks exchange their marks, so that the deviating rank can be named

The result is known before the optimizer steps. Inputs and targets that a rank neither has nor needs leave no mark; nor
do placeholders for them: tensors whose numbers are all equal, tensors on the meta device. Every rank gets all extras,
so None and a missing name leave a mark as well.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError, listed_ranks

from ...blocks.trees import ONE_TENSOR, flatten
from ...comm.device import is_accelerator
from .tree_digests import DigestNumber, differ, digest, samples_of, structure_of, top_bits

DATA_KINDS = ("inputs", "targets", "extras")

_WIDTH = 3 * len(DATA_KINDS)
_BITS = 20
_MOST_SLOTS = 64
"""Number of replicas that are compared in one step; where there are more, they take turns."""
_MOST_LETTERS = 300
"""Number of characters of a structure's description in messages."""

ADVICE = (
    "give all ranks of a replica the same samples in the same order, sequences whole, chosen by engine.replica and "
    "engine.num_replicas alone (a loader that shuffles needs a generator or sampler with a seed of its own, the same "
    "on all of them)"
)


class DataDigest(NamedTuple):
    """Mark of one kind of data: a number below 2^20, and the data's structure, in words.

    `is_given` is 1, or 0 for a placeholder.
    """

    number: DigestNumber
    is_given: DigestNumber
    words: str


DigestRow = Tensor | Sequence[DigestNumber]
StepDigests = list[DataDigest | None]
"""Marks of the inputs, the targets and the extras of a step."""

_NO_EXTRAS = DataDigest(0, 1, "nothing")


def is_real(mark: DataDigest | None) -> bool:
    """Whether the data of a mark are known to be real, and no placeholder."""
    return mark is not None and isinstance(mark.is_given, int)


class DataMarks:
    """The marks of one rank's steps, and the check of the sums over all ranks.

    Args:
        ranks: the ranks that the sums run over.
        replica_of: rank → its replica.
        rank: this rank.
        device: where the sums are computed.
        share: all-gathers bytes over these ranks, in their order.
        tell: is called with the error before it is raised.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        replica_of: Callable[[int], int],
        rank: int,
        device: torch.device,
        share: Callable[[bytes], Sequence[bytes]] = lambda mine: [],
        tell: Callable[[MisfitError], object] = lambda error: None,
    ) -> None:
        self._ranks, self._device, self._share, self._tell = list(ranks), device, share, tell
        members: dict[int, list[int]] = {}
        for other in ranks:
            members.setdefault(replica_of(other), []).append(other)
        self._members = list(members.values())
        self._mine = list(members).index(replica_of(rank))
        self._turns = -(-len(members) // _MOST_SLOTS)
        self._slots = -(-len(members) // self._turns)
        self._compares = max(map(len, self._members)) > 1
        self._is_there = is_accelerator(device)
        self._nothing = self._there([0] * (self._slots * _WIDTH))
        self._latest: tuple[list[DigestNumber], DigestRow, StepDigests] = [], self._nothing, []
        self._of_nothing: StepDigests = [None, None, _NO_EXTRAS]
        self._marks: StepDigests | None = None
        self._taken: StepDigests = []
        self._turn = self._noted = 0
        self.equal: Sequence[float] = ()
        """The last sums of equal marks."""

    def note(self, given: Mapping[str, Any], needed: Mapping[str, bool], extras: Mapping[str, Any]) -> StepDigests:
        """Record marks of this rank's data for a step, or for one more batch of it, and return them.

        `given` and `needed` have "inputs" and "targets", in this order.
        """
        if not self._compares:
            return [None, None]
        turn = self._noted
        self._noted += 1
        found = self._of_nothing
        for place, (name, tree) in enumerate(given.items()):
            if tree is not None or needed[name]:
                found = [*found] if found is self._of_nothing else found
                found[place] = mark_of(tree, is_needed=needed[name], turn=turn)
        if extras:
            found = [*found]
            found[2] = mark_of(dict(sorted(extras.items())), is_needed=True, turn=turn)
        if self._marks is not None:
            found = [_folded(before, now) for before, now in zip(self._marks, found, strict=True)]
        self._marks = found
        return found

    def take_row(self) -> DigestRow:
        """Return the step's row, to be summed over the ranks: n numbers, none where nothing is compared."""
        marks, self._marks = self._marks, None
        if not self._compares:
            return ()
        self._turn = (self._turn + 1) % self._turns
        slot, turn = divmod(self._mine, self._turns)
        self._taken = marks or []
        if turn != self._turn or marks is None:
            return self._nothing
        if marks is self._latest[2]:
            return self._latest[1]
        row: list[DigestNumber] = [0] * (self._slots * _WIDTH)
        for kind, mark in enumerate(marks):
            if mark is not None:
                at, number, is_given = slot * _WIDTH + 3 * kind, mark.number, mark.is_given
                row[at : at + 3] = is_given, number * is_given, number * number * is_given
        elsewhere = [at for at, number in enumerate(row) if isinstance(number, Tensor)] if self._is_there else []
        if not elsewhere and row == self._latest[0]:
            return self._latest[1]
        known = [0 if at in elsewhere else number for at, number in enumerate(row)] if elsewhere else row
        table = self._there(known) if self._is_there else row
        for at in elsewhere:
            table[at] = row[at]  # type: ignore[index]
        if not elsewhere:
            self._latest = row, table, marks
        return table

    def _there(self, row: list[Any]) -> DigestRow:
        """Return a row on the device, float64; where the host is that device, itself."""
        if not self._is_there:
            return row
        return torch.tensor(row, dtype=torch.float64).to(self._device, non_blocking=True)

    def require_equal(self, sums: Sequence[float]) -> None:
        """Raise `MisfitError`, on all ranks that the sums ran over, where ranks of a replica had different data."""
        for at in range(0, len(sums), 3):
            count, total, squares = sums[at : at + 3]
            if int(count) * int(squares) != int(total) ** 2:
                slot, place = divmod(at, _WIDTH)
                self._refuse(self._members[slot * self._turns + self._turn], place // 3)
        self.equal = sums

    def _refuse(self, members: Sequence[int], kind: int) -> None:
        """Raise `MisfitError` that names the deviating ranks; all ranks that the sums ran over take part."""
        mark = self._taken[kind] if self._taken else None
        told = None if mark is None or not int(mark.is_given) else [int(mark.number), mark.words[:_MOST_LETTERS]]
        all_told = dict(zip(self._ranks, map(json.loads, self._share(json.dumps(told).encode())), strict=False))
        given = {rank: (all_told[rank][0], all_told[rank][1]) for rank in members if all_told.get(rank) is not None}
        error = MisfitError(
            f"{listed_ranks(members)} belong to one replica, but were not all given the same {DATA_KINDS[kind]} in "
            f"this step, which changed no weights{who_is_odd(given)}: {ADVICE}"
        )
        self._tell(error)
        raise error


def mark_of(tree: Any, *, is_needed: bool, turn: int = 0) -> DataDigest | None:
    """Return the mark of a tree; None: missing or a placeholder, on a rank that does not need it."""
    if tree is None and not is_needed:
        return None
    built, tensors = (ONE_TENSOR, (tree,)) if isinstance(tree, Tensor) else flatten(tree)
    samples: list[Tensor] = []
    is_shown = bool(tensors)
    for tensor in tensors:
        found = samples_of(tensor, turn)
        is_shown = is_shown and found is not None
        samples += found if found is not None and tensor.numel() else ()
    if not (is_needed or is_shown):
        return None
    is_given = 1 if is_needed else differ(samples)
    if isinstance(is_given, int) and not is_given:
        return None
    words = structure_of(built, tensors)
    return DataDigest(top_bits(digest(words, samples), _BITS), is_given, words)


def is_place_holder(tree: Any) -> bool:
    """Whether a tree is a placeholder for unneeded data: no numbers, or all numbers of a tensor are equal."""
    _, tensors = flatten(tree)
    if None in map(samples_of, tensors):
        return True
    return all(not tensor.numel() or bool((tensor == tensor.reshape(-1)[0]).all()) for tensor in tensors)


def who_is_odd(given: Mapping[int, tuple[int, str]]) -> str:
    """Name the ranks that differ from the majority, with the structure of their data, if that can be told.

    `given` has (mark, words) of each rank.
    """
    if len({number for number, _ in given.values()}) < 2:
        return ""
    most, count = Counter(number for number, _ in given.values()).most_common(1)[0]
    words = {rank: text for rank, (_, text) in given.items()}
    are_built_alike = len(set(words.values())) == 1
    if 2 * count <= len(given):
        built = "" if are_built_alike else "".join(f"; rank {rank} was given {text}" for rank, text in words.items())
        return f" (nobody can be told from the other{'s' * (len(given) > 2)}{built})"
    odd = [rank for rank, (number, _) in given.items() if number != most]
    usual = [rank for rank in given if rank not in odd]
    said = f" ({listed_ranks(odd)} {'was' if len(odd) == 1 else 'were'} given something else than {listed_ranks(usual)}"
    return said + (")" if are_built_alike else f": {words[odd[0]]}, and not {words[usual[0]]})")


def _folded(before: DataDigest | None, now: DataDigest | None) -> DataDigest | None:
    if before is None or now is None:
        return None
    number = (before.number * 31 + now.number) % 2**_BITS
    return DataDigest(number, before.is_given * now.is_given, now.words)
