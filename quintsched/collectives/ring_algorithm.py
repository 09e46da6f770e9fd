"""Ring algorithm: in every step each rank sends to the next rank and receives from the previous one.

    4 ranks, chunk 0 of an all-reduce     rank 1 ─▶ 2 ─▶ 3 ─▶ 0        the sum grows until its owner: reduce-scatter
    (chunk r likewise, from r+1 on)       rank 0 ─▶ 1 ─▶ 2 ─▶ 3        the sum is passed on: all-gather

In each half every rank sends (n-1)/n of the data in n-1 steps, and no algorithm sends less (Patarasu, Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"). With c·n chunks there are c rounds in
sequence, with messages of 1/c the size.
"""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.collectives.collective_program import CollectiveKind, CollectiveStep, SendRecv


def ring_programs(kind: CollectiveKind, size: int, chunks: int) -> tuple[tuple[CollectiveStep, ...], ...]:
    """Return every rank's program; `chunks` is a multiple of `size`."""
    return tuple(tuple(_program(kind, rank, size, chunks // size)) for rank in range(size))


def _program(kind: CollectiveKind, rank: int, size: int, rounds: int) -> Iterator[CollectiveStep]:
    for number in range(rounds):
        if kind != "all_gather":
            yield from _half(rank, size, rounds, number, first=rank - 1, reduce=True)
        if kind != "reduce_scatter":
            yield from _half(rank, size, rounds, number, first=rank, reduce=False)


def _half(rank: int, size: int, rounds: int, number: int, *, first: int, reduce: bool) -> Iterator[CollectiveStep]:
    """Yield a rank's steps that send chunk `number` of part `first`, then of the parts before it."""
    to, source = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        sent, received = (first - step) % size, (first - step - 1) % size
        yield SendRecv(to, sent * rounds + number, source, received * rounds + number, reduce)


def ring_steps(kind: CollectiveKind, size: int, chunks: int) -> int:
    """Return the number of steps in sequence."""
    return (2 if kind == "all_reduce" else 1) * (size - 1) * (chunks // size)
