"""A plan's instructions as arrays, one row each, rank after rank: for what looks at all of them at once.

row     0    1    2   …        rank 0's program, then rank 1's, …
op      Fwd  Send Bwd …        index into `instructions.ALL`
stage, unit, peer              -1 where an instruction has none; `unit` is its microbatch, or its bucket
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.ir.instructions import ALL, Instruction

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Amounts: TypeAlias = npt.NDArray[np.float64]

_CODES = {kind: code for code, kind in enumerate(ALL)}


@dataclass(frozen=True)
class Columns:
    """The arrays; all but `first` have one entry per instruction. `first[k]` is the row of rank k's first one."""

    first: Ints
    rank: Ints
    op: Ints
    stage: Ints
    unit: Ints
    peer: Ints

    @classmethod
    def of(cls, programs: tuple[tuple[Instruction, ...], ...]) -> Columns:
        """Read the arrays off the programs; O(instructions)."""
        sizes = np.array([len(program) for program in programs], dtype=np.int64)
        rows = list(chain.from_iterable(programs))
        return cls(
            first=np.concatenate([[0], np.cumsum(sizes)]),
            rank=np.repeat(np.arange(len(programs)), sizes),
            op=_ints([_CODES[type(i)] for i in rows]),
            stage=_ints([getattr(i, "stage", -1) for i in rows]),
            unit=_ints([getattr(i, "microbatch", -1) for i in rows]),
            peer=_ints([getattr(i, "peer", -1) for i in rows]),
        )

    def __len__(self) -> int:
        return len(self.op)

    def are(self, *kinds: type[Instruction]) -> Flags:
        """Which rows hold an instruction of one of these classes (or of a class below them)."""
        wanted = np.array([issubclass(kind, kinds) for kind in ALL])
        return wanted[self.op]

    def rows_of(self, rank: int) -> range:
        """The rows of one rank's program."""
        return range(int(self.first[rank]), int(self.first[rank + 1]))

    def place(self, row: int) -> tuple[int, int]:
        """Return (rank, index in its program) of a row."""
        rank = int(self.rank[row])
        return rank, int(row - self.first[rank])


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
