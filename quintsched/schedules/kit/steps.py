"""Orders that are written as arrays: lanes of steps, each so many beats behind the first.

    beat       0   1   2   3   4   5        a lane's k-th step comes at beat `delay` + k;
    Fwd        F0  F1  F2  F3               at one beat, lanes take turns in the order given
    Bwd, 2             B0  B1  B2  B3       ▶  F0 F1 F2 B0 F3 B1 B2 B3

For a schedule of a million steps this is much quicker than a generator, and says the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quintsched.ir.columns import CODES, Codes, Columns, Ints
from quintsched.ir.instructions import ALL, Compute


@dataclass(frozen=True, eq=False)
class Steps:
    """The computations of one rank in order, as arrays; iterated over, it yields them one by one."""

    op: Codes
    stage: Ints
    microbatch: Ints

    def __iter__(self) -> Iterator[Compute]:
        for code, stage, microbatch in zip(
            self.op.tolist(), self.stage.tolist(), self.microbatch.tolist(), strict=True
        ):
            kind = ALL[code]
            assert issubclass(kind, Compute)
            yield kind(stage, microbatch)

    def columns(self) -> Columns:
        """Return them as the columns of a plan of one rank."""
        return Columns(np.array([0, len(self.op)]), self.op, {"stage": self.stage, "microbatch": self.microbatch})


@dataclass(frozen=True, eq=False)
class Lane:
    """Steps of one kind: the k-th computes `stages[k]` and `microbatches[k]`, at beat `delay` + k."""

    kind: type[Compute]
    delay: int
    stages: Ints
    microbatches: Ints


def alternate(*lanes: Lane) -> Steps:
    """Return the steps of all lanes beat by beat."""
    beats = np.concatenate([lane.delay + np.arange(len(lane.stages)) for lane in lanes])
    order = np.argsort(beats, kind="stable")
    op = np.concatenate([np.full(len(lane.stages), CODES[lane.kind], np.uint8) for lane in lanes])
    stages = np.concatenate([lane.stages for lane in lanes])
    return Steps(op[order], stages[order], np.concatenate([lane.microbatches for lane in lanes])[order])


def rounds(units: int, pp: int, chunks: int) -> tuple[Ints, Ints]:
    """Return (chunks, microbatches) of units that go round the chunks in groups of `pp` microbatches.

    pp 2, 2 chunks:    chunk 0: mb 0, 1    chunk 1: mb 0, 1    chunk 0: mb 2, 3    chunk 1: …
    """
    group, within = np.divmod(np.arange(units), pp * chunks)
    chunk, microbatch = np.divmod(within, pp)
    return chunk, group * pp + microbatch
