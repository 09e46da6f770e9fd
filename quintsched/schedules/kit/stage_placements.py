"""Placements: the pipeline rank of each stage, by stage.

linear   pp=4            0 1 2 3
loop     pp=4, chunks=2  0 1 2 3 0 1 2 3
v        pp=4, chunks=2  0 1 2 3 3 2 1 0
bidirectional, pp=4      0 1 2 3 3 2 1 0     two copies of a model of four stages, run in opposite directions
"""

from __future__ import annotations


def linear(pp: int, chunks: int) -> tuple[int, ...]:
    """Place one stage per rank, in order: stage s on rank s. `chunks` is 1."""
    return tuple(range(pp * chunks))


def loop(pp: int, chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s mod pp, so each rank holds `chunks` stages that are pp apart (Megatron, SC'21)."""
    return tuple(stage % pp for stage in range(pp * chunks))


def v(pp: int, chunks: int) -> tuple[int, ...]:
    """Place stages in a zig-zag, down the ranks and up again, so that with two chunks rank 0 holds first and last."""
    down = tuple(range(pp))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


def bidirectional(pp: int, chunks: int) -> tuple[int, ...]:
    """Place stages 0 to pp-1 down the ranks, and their twins pp to 2 pp - 1 up again (DualPipe, arXiv:2412.19437)."""
    return v(pp, 2 * chunks)
