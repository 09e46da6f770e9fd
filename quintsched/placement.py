"""Which pipeline rank holds which stage.

linear   pp=4            0 1 2 3
loop     pp=4, chunks=2  0 1 2 3 0 1 2 3
"""

from __future__ import annotations


def linear(pp: int, chunks: int) -> tuple[int, ...]:
    """One stage per rank, in order: stage s is on rank s. `chunks` is 1."""
    return tuple(range(pp * chunks))


def loop(pp: int, chunks: int) -> tuple[int, ...]:
    """Stage s is on rank s mod pp, so each rank holds `chunks` stages that are pp apart (Megatron, SC'21)."""
    return tuple(stage % pp for stage in range(pp * chunks))
