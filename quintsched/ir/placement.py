"""Which pipeline rank holds which stage.

linear   pp=4            0 1 2 3
loop     pp=4, chunks=2  0 1 2 3 0 1 2 3
v        pp=4, chunks=2  0 1 2 3 3 2 1 0
bidirectional, pp=4      0 1 2 3 3 2 1 0     two models of four stages, that run against each other
"""

from __future__ import annotations


def linear(pp: int, chunks: int) -> tuple[int, ...]:
    """One stage per rank, in order: stage s is on rank s. `chunks` is 1."""
    return tuple(range(pp * chunks))


def loop(pp: int, chunks: int) -> tuple[int, ...]:
    """Stage s is on rank s mod pp, so each rank holds `chunks` stages that are pp apart (Megatron, SC'21)."""
    return tuple(stage % pp for stage in range(pp * chunks))


def v(pp: int, chunks: int) -> tuple[int, ...]:
    """Zig-zag: the stages go down the ranks and up again, so that the last stage is on the rank of the first."""
    down = tuple(range(pp))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


def bidirectional(pp: int, chunks: int) -> tuple[int, ...]:
    """Stages 0 to pp-1 down the ranks, and their twins pp to 2 pp - 1 up again (DualPipe, arXiv:2412.19437)."""
    return v(pp, 2 * chunks)
