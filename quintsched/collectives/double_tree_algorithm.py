"""Double binary tree all-reduce: each half of the data is reduced up its own tree and broadcast down again.

    5 ranks    tree 0     3           tree 1     4         inner ranks of tree 0 are leaves of tree 1, so that each rank
                        1   4                  2   0       has at most two sends and two receives per pair of chunks
                       0 2                    1 3

Half the ranks of a single tree are leaves and never send downwards. With two trees every rank works, and the number
of steps in sequence is about 2·log2(n), not the ring's 2(n-1). Each edge has a colour, 0 or 1; no two edges of one
colour leave the same rank or arrive at the same rank. Edges of colour 0 are used in even steps, the others in odd
ones: a rank sends and receives at most once per step. The broadcast runs the same steps in reverse.

Sanders, Speck, Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; NCCL 2.4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from quintsched.collectives.collective_program import CollectiveStep, RecvChunk, SendChunk, SendRecv


@dataclass(frozen=True)
class BinaryTree:
    """Binary tree over all ranks: `parents[r]` is the parent of rank r, None for the root."""

    parents: tuple[int | None, ...]

    def children(self, rank: int) -> tuple[int, ...]:
        """Ranks whose parent is `rank`."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == rank)

    def leaves_first(self) -> list[int]:
        """Ranks without the root, children before their parents."""
        found: list[int] = []
        level = [rank for rank, parent in enumerate(self.parents) if parent is None]
        while level:
            found += level
            level = [child for rank in level for child in self.children(rank)]
        return found[:0:-1]


def double_tree(size: int) -> tuple[BinaryTree, BinaryTree]:
    """Return two trees over the same ranks; no rank is an inner node of both."""
    first = _in_order_tree(size)
    if size % 2 == 0:
        return first, _renamed(first, [size - 1 - rank for rank in range(size)])
    return first, _renamed(first, [(rank + 1) % size for rank in range(size)])


def _in_order_tree(size: int) -> BinaryTree:
    """Return a balanced tree whose inner nodes are the odd ranks; its in-order traversal is 0, 1, 2, …"""
    parents: list[int | None] = [None] * size

    def build(low: int, high: int, parent: int | None) -> None:
        """Build the subtree of ranks `low` to `high`, both even, under a parent; the last leaf may be missing."""
        top = low if low == high else 2 * ((low + high) // 4) + 1
        if top < size:
            parents[top] = parent
        if low < high:
            build(low, top - 1, top)
            build(top + 1, high, top)

    build(0, 2 * (size // 2), None)
    return BinaryTree(tuple(parents))


def _renamed(tree: BinaryTree, names: list[int]) -> BinaryTree:
    parents: list[int | None] = [None] * len(names)
    for rank, parent in enumerate(tree.parents):
        parents[names[rank]] = None if parent is None else names[parent]
    return BinaryTree(tuple(parents))


Edge = tuple[int, int]
"""(tree number, rank at the lower end of the edge)."""


@dataclass(frozen=True)
class Timetable:
    """Step at which each edge carries its first chunk upwards; the next chunk follows `period` steps later.

    `fill` is the number of steps until the first pair of chunks has reached the roots; `alone` is the length of the
    critical path of a single pair of chunks, which need not keep to the colours.
    """

    trees: tuple[BinaryTree, BinaryTree]
    first: dict[Edge, int]
    period: int
    fill: int
    alone: int


@lru_cache(maxsize=64)
def timetable(size: int) -> Timetable:
    """Return the timetable of the double tree over `size` ranks; cached."""
    trees = double_tree(size)
    colours = _colours(trees)
    period = 1 + max(colours.values())
    first: dict[Edge, int] = {}
    for number, tree in enumerate(trees):
        for rank in tree.leaves_first():
            earliest = max((first[number, child] + 1 for child in tree.children(rank)), default=0)
            first[number, rank] = earliest + (colours[number, rank] - earliest) % period
    return Timetable(trees, first, period, 1 + max(first.values()), _longest_chain(trees, first))


def _longest_chain(trees: tuple[BinaryTree, BinaryTree], first: dict[Edge, int]) -> int:
    """Return the longest sequence of dependent messages of one pair of chunks, if each rank does one at a time."""
    steps: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (number, rank), step in first.items():
        parent = trees[number].parents[rank]
        assert parent is not None
        steps[step].append((rank, parent))
    free = [0] * len(trees[0].parents)
    for _, pairs in sorted(steps.items()):
        ends = [(rank, 1 + max(free[rank] for rank in pair)) for pair in pairs for rank in pair]
        for rank, end in ends:
            free[rank] = max(free[rank], end)
    return max(free)


def _colours(trees: tuple[BinaryTree, BinaryTree]) -> dict[Edge, int]:
    """Colour the edges so that edges of one colour share neither their sender nor their receiver.

    A rank sends on at most two edges and receives on at most two: so the edges form paths and even cycles, along
    which the colours alternate.
    """
    ports: dict[tuple[str, int], list[Edge]] = defaultdict(list)
    for number, tree in enumerate(trees):
        for rank, parent in enumerate(tree.parents):
            if parent is not None:
                ports["from", rank].append((number, rank))
                ports["to", parent].append((number, rank))
    beside: dict[Edge, list[Edge]] = defaultdict(list)
    for edges in ports.values():
        for edge in edges:
            beside[edge] += [other for other in edges if other != edge]
    colours: dict[Edge, int] = {}
    for start in beside:
        queue = [] if start in colours else [start]
        colours.setdefault(start, 0)
        for edge in queue:
            for other in beside[edge]:
                if other not in colours:
                    colours[other] = 1 - colours[edge]
                    queue.append(other)
    return colours


def tree_programs(size: int, chunks: int) -> tuple[tuple[CollectiveStep, ...], ...]:
    """Return every rank's program of an all-reduce; of the chunks (an even number), tree 0 has the even ones."""
    sends: list[dict[int, Edge]] = [{} for _ in range(size)]
    receives: list[dict[int, Edge]] = [{} for _ in range(size)]
    upwards = tree_steps(size, chunks) // 2
    for step, source, target, chunk in _all_messages(timetable(size), chunks, upwards):
        sends[source][step] = target, chunk
        receives[target][step] = source, chunk
    return tuple(tuple(_program(sent, received, upwards)) for sent, received in zip(sends, receives, strict=True))


def _all_messages(table: Timetable, chunks: int, upwards: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (step, source, target, chunk) of each message up the tree, and of its mirror image down."""
    for (number, rank), first in table.first.items():
        parent = table.trees[number].parents[rank]
        assert parent is not None
        for turn in range(chunks // 2):
            step, chunk = first + table.period * turn, 2 * turn + number
            yield step, rank, parent, chunk
            yield 2 * upwards - 1 - step, parent, rank, 2 * (chunks // 2 - 1 - turn) + number


def _program(sends: dict[int, Edge], receives: dict[int, Edge], upwards: int) -> Iterator[CollectiveStep]:
    for step in sorted({*sends, *receives}):
        reduce = step < upwards
        if step in sends and step in receives:
            yield SendRecv(*sends[step], *receives[step], reduce)
        elif step in sends:
            yield SendChunk(*sends[step])
        else:
            yield RecvChunk(*receives[step], reduce)


def tree_steps(size: int, chunks: int) -> int:
    """Return the number of steps of the timetable: twice (fill + period for each further pair of chunks)."""
    table = timetable(size)
    return 2 * (table.fill + table.period * (chunks // 2 - 1))


def tree_chain(size: int, chunks: int) -> int:
    """Return the number of steps in sequence, where ranks need not wait for the timetable."""
    return 2 * timetable(size).alone if chunks == 2 else tree_steps(size, chunks)
