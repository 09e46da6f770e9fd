"""Two-level algorithm: rings inside nodes, and rings of the ranks at the same place of all nodes.

    2 nodes of 3 ranks     [ 0 1 2 ]  [ 3 4 5 ]      ring in each node, once for each node's parts: reduce-scatter
    (part r belongs to       │ │ │      │ │ │        rings 0-3, 1-4, 2-5 between nodes: reduce-scatter, all-gather
    rank r)                  └─┼─┼──────┘ │ │        ring in each node: all-gather
                               └─┼────────┘ │
                                 └──────────┘        a message between nodes: (nodes - 1) / size of the data per rank

A rank sends as many bytes as in one ring over all ranks, but only that part of them between nodes, and in nodes - 1
steps instead of size - 1. NCCL's and Horovod's hierarchical all-reduces are of this form (Jia et al. 2018,
arXiv:1807.11205).
"""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.collectives.collective_program import CollectiveKind, CollectiveStep, SendRecv


def two_level_programs(
    kind: CollectiveKind, size: int, chunks: int, nodes: int
) -> tuple[tuple[CollectiveStep, ...], ...]:
    """Return every rank's program; `nodes` divides `size`, which divides `chunks`; ranks of a node are consecutive."""
    return tuple(tuple(_program(kind, rank, size, chunks // size, nodes)) for rank in range(size))


def _program(kind: CollectiveKind, rank: int, size: int, rounds: int, nodes: int) -> Iterator[CollectiveStep]:
    local = size // nodes
    node, place = divmod(rank, local)
    inside = [range(other * local, (other + 1) * local) for other in range(nodes)]
    across = range(place, size, local)
    for number in range(rounds):
        if kind != "all_gather":
            for parts in inside:
                yield from _ring(place, inside[node], parts, rounds, number, first=place - 1, reduce=True)
            yield from _ring(node, across, across, rounds, number, first=node - 1, reduce=True)
        if kind != "reduce_scatter":
            yield from _ring(node, across, across, rounds, number, first=node, reduce=False)
            for parts in inside:
                yield from _ring(place, inside[node], parts, rounds, number, first=place, reduce=False)


def _ring(
    own: int, ranks: range, parts: range, rounds: int, number: int, *, first: int, reduce: bool
) -> Iterator[CollectiveStep]:
    """Yield the steps of the ring's member `own`, for chunk `number` of each part."""
    members = len(ranks)
    to, source = ranks[(own + 1) % members], ranks[own - 1]
    for step in range(members - 1):
        sent, received = (parts[(first - step - late) % members] * rounds + number for late in (0, 1))
        yield SendRecv(to, sent, source, received, reduce)


def two_level_steps(kind: CollectiveKind, size: int, chunks: int, nodes: int) -> tuple[int, int]:
    """Return the numbers of steps in sequence inside nodes, and between nodes."""
    passes = (2 if kind == "all_reduce" else 1) * (chunks // size)
    return passes * nodes * (size // nodes - 1), passes * (nodes - 1)
