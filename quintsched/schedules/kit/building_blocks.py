"""Controllable memory (Qi et al. 2024, arXiv:2405.15362): repeat the block of one microbatch, then close the gaps.

A *block* gives the slot in which each rank starts the four passes of microbatch 0, in a V of two chunks (a slot is the
time of a chunk's forward). Microbatch j does the same 6j slots later, as a rank has 6 passes per microbatch. Weight
halves go into the gaps (f forward, i input half; 0 the chunk on the way down, 1 on the way up; capitals: microbatch 1):

           0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
    rank 0 f0       f1       F0    i1 F1    i0       I1       I0
    rank 1    f0 f1             F0 F1 i1 i0             I1 I0

The lifetimes of activations in a block determine the memory. Run literally, it takes long to fill and to drain; so the
blocks only give an order. In each slot a rank does the first pass of its order, or, if that cannot run yet, a later
one: a forward only if the cap leaves room for all passes that come before it in the order. Weight halves fill the other
slots, or free memory when it is full.

With activations of at most k chunks, this takes (6P-1-3k)/2 beyond M(F+I+W) at unit costs, k < 2P.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quintsched.ir.instruction_set import BwdInput, BwdWeight, Compute, Fwd
from quintsched.schedules.kit.registry import Shape

PERIOD = 6
"""Passes of a rank per microbatch: three for each of two chunks."""

PASSES: tuple[tuple[type[Compute], int], ...] = ((Fwd, 0), (Fwd, 1), (BwdInput, 1), (BwdInput, 0))
"""Passes of a microbatch on a rank (without weight halves), in order of time: instruction and chunk."""

PassSlots = tuple[int, int, int, int]
"""Slot in which a rank starts each of `PASSES` for microbatch 0."""


def repeat_and_close_up(
    shape: Shape, blocks: Sequence[PassSlots], cap: int, spare: int = 0
) -> tuple[tuple[Compute, ...], ...]:
    """Return the order of all ranks, none of which ever holds activations of more than `cap` chunks.

    Args:
        shape: two chunks in a V.
        blocks: one block per rank, which must not need more than `cap` itself when it is repeated.
        cap: in chunks' activations.
        spare: room, in chunks, that a forward ahead of its turn must leave besides.
    """
    ranks = [_RankSlots(shape.stages_of(rank), block, shape, cap, spare) for rank, block in enumerate(blocks)]
    progress = _Progress(2 * shape.pp)
    while started := [done for rank in ranks if (done := rank.run_pass(progress))]:
        progress.count_passes(started)
    return tuple(tuple(rank.order) for rank in ranks)


class _Progress:
    """Number of microbatches that each stage has done; they come in order."""

    def __init__(self, num_stages: int) -> None:
        self._forwards = [0] * num_stages
        self._inputs = [0] * num_stages

    def allows(self, kind: type[Compute], stage: int, microbatch: int) -> bool:
        """Return whether the inputs of a pass exist."""
        if kind is Fwd:
            return stage == 0 or self._forwards[stage - 1] > microbatch
        above = self._forwards if stage == len(self._inputs) - 1 else self._inputs[1:]
        return self._forwards[stage] > microbatch and above[stage] > microbatch

    def count_passes(self, started: Sequence[Compute]) -> None:
        """Count the passes of one slot as done."""
        for done in started:
            self._forwards[done.stage] += isinstance(done, Fwd)
            self._inputs[done.stage] += isinstance(done, BwdInput)


class _RankSlots:
    """Order of one rank while it is built, slot by slot."""

    def __init__(self, stages: tuple[int, ...], block: PassSlots, shape: Shape, cap: int, spare: int) -> None:
        self.order: list[Compute] = []
        self._stages = [stages[chunk] for _, chunk in PASSES]
        self._end = [start + PERIOD * shape.microbatches for start in block]
        self._due = list(block)
        """Next slot of each pass of `PASSES` in the repeated block."""
        self._next = [0, 0, 0, 0]
        """Microbatch of that pass."""
        self._cap, self._spare = cap, spare
        self._memory = 0
        self._pending: deque[BwdWeight] = deque()

    def run_pass(self, progress: _Progress) -> Compute | None:
        """Do one pass if any can run, and return it."""
        found = self._pass(progress) or (self._pending.popleft() if self._pending else None)
        if found is None:
            return None
        self._memory += isinstance(found, Fwd) - isinstance(found, BwdWeight)
        if isinstance(found, BwdInput):
            self._pending.append(BwdWeight(found.stage, found.microbatch))
        self.order.append(found)
        return found

    def _pass(self, progress: _Progress) -> Compute | None:
        """Take the first pass that can run; None if the first pass of all needs memory that is not free."""
        for place, which in enumerate(sorted(range(len(PASSES)), key=self._due.__getitem__)):
            kind, stage, microbatch = PASSES[which][0], self._stages[which], self._next[which]
            if self._due[which] == self._end[which] or not progress.allows(kind, stage, microbatch):
                continue
            if kind is Fwd and self._memory == self._cap:
                if place == 0:
                    return None
                continue
            if kind is Fwd and place > 0 and self._fullest_before(which) + self._spare >= self._cap:
                continue
            self._due[which] += PERIOD
            self._next[which] += 1
            return kind(stage, microbatch)
        return None

    def _fullest_before(self, last: int) -> int:
        """Return the peak memory, in chunks, up to pass `last` of the block order, if weight halves follow at once."""
        due = list(self._due)
        standing = most = self._next[0] + self._next[1] - self._next[2] - self._next[3]
        while True:
            which = min((w for w in range(len(PASSES)) if due[w] < self._end[w]), key=due.__getitem__)
            if which == last:
                return most
            standing += 1 if PASSES[which][0] is Fwd else -1
            most = max(most, standing)
            due[which] += PERIOD
