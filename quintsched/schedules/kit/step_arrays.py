"""Orders written as arrays: lanes of steps, each delayed by some beats.

    beat       0   1   2   3   4   5        a lane's k-th step comes at beat `delay` + k;
    Fwd        F0  F1  F2  F3               at one beat, lanes take turns in the order given
    Bwd, 2             B0  B1  B2  B3       ▶  F0 F1 F2 B0 F3 B1 B2 B3

For a schedule of a million steps this is much faster than a generator, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintsched.ir.instruction_columns import CODES, Columns, Ints
from quintsched.ir.instruction_set import Bwd, Compute, Fwd, Instruction, Overlap
from quintsched.ir.rank_programs import Program


@dataclass(frozen=True, eq=False)
class StepColumns:
    """Computations of one rank in order, as columns of one program; iterating yields them one by one."""

    columns: Columns

    def __iter__(self) -> Iterator[Compute | Overlap]:
        for found in Program(self.columns, 0):
            assert isinstance(found, Compute | Overlap)
            yield found


@dataclass(frozen=True, eq=False)
class StepLane:
    """Steps of one kind: the k-th computes `stages[k]` on `microbatches[k]`, at beat `delay` + k."""

    kind: type[Compute]
    delay: int
    stages: Ints
    microbatches: Ints


def alternate(*lanes: StepLane) -> StepColumns:
    """Return the steps of all lanes, merged beat by beat."""
    beats = np.concatenate([lane.delay + np.arange(len(lane.stages)) for lane in lanes])
    order = np.argsort(beats, kind="stable")
    op = np.concatenate([np.full(len(lane.stages), CODES[lane.kind], np.uint8) for lane in lanes])
    stages = np.concatenate([lane.stages for lane in lanes])
    microbatches = np.concatenate([lane.microbatches for lane in lanes])
    fields = {"stage": stages[order], "microbatch": microbatches[order]}
    return StepColumns(Columns(np.array([0, len(op)]), op[order], fields))


def side_by_side(forwards: StepLane, backwards: StepLane) -> StepColumns:
    """Return the steps of two lanes of equal length, merged beat by beat; two at one beat become one `Overlap`.

    Only the backwards may be delayed.
    """
    late, both = backwards.delay, len(forwards.stages) - backwards.delay
    pairs = [
        list(zip(lane.stages[at].tolist(), lane.microbatches[at].tolist(), strict=True))
        for lane, at in ((forwards, slice(late, None)), (backwards, slice(None, both)))
    ]
    parts: tuple[tuple[type[Instruction], Mapping[str, Any]], ...] = (
        (Fwd, {"stage": forwards.stages[:late], "microbatch": forwards.microbatches[:late]}),
        (Overlap, dict(zip(("forward", "backward"), pairs, strict=True))),
        (Bwd, {"stage": backwards.stages[both:], "microbatch": backwards.microbatches[both:]}),
    )
    sizes = (late, both, late)
    columns = [
        Columns.make(kind, np.zeros(size, np.int64), 1, **fields)
        for (kind, fields), size in zip(parts, sizes, strict=True)
    ]
    return StepColumns(columns[0].append(*columns[1:]))


def rounds(units: int, pp: int, chunks: int) -> tuple[Ints, Ints]:
    """Return (chunks, microbatches) of units that visit the chunks in groups of `pp` microbatches.

    pp 2, 2 chunks:    chunk 0: mb 0, 1    chunk 1: mb 0, 1    chunk 0: mb 2, 3    chunk 1: …
    """
    group, within = np.divmod(np.arange(units), pp * chunks)
    chunk, microbatch = np.divmod(within, pp)
    return chunk, group * pp + microbatch
