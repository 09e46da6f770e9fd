"""Generator of spelled-out collectives, with checks of kind, algorithm and sizes."""

from __future__ import annotations

from quintsched.collectives.collective_program import (
    ALGORITHMS,
    COLLECTIVE_KINDS,
    MAX_CHUNKS,
    MAX_SIZE,
    Algorithm,
    CollectiveKind,
    CollectiveProgram,
)
from quintsched.collectives.double_tree_algorithm import tree_chain, tree_programs
from quintsched.collectives.ring_algorithm import ring_programs, ring_steps
from quintsched.collectives.two_level_algorithm import two_level_programs
from quintsched.errors import UsageError, counted, suggest

TREE_CHUNKS = 8
"""Default number of chunks for a tree of more than two ranks; over two, further chunks fill no level of it."""


def spelled(kind: str, algorithm: str, size: int, chunks: int | None = None, nodes: int = 1) -> CollectiveProgram:
    """Return the programs of a collective over `size` ranks.

    `chunks` is a multiple of `size` for rings (default: `size`), an even number for a tree (default: 8, over two ranks
    2). `nodes` is for two levels. Raises `UsageError` for an unknown kind or algorithm, and for a combination that is
    impossible.
    """
    what, how = find_kind(kind), find_algorithm(algorithm)
    cut = _require_spellable(what, how, size, chunks)
    if how == "two-level":
        _require_nodes(size, nodes)
        return CollectiveProgram(what, how, size, cut, two_level_programs(what, size, cut, nodes), nodes)
    programs = ring_programs(what, size, cut) if how == "ring" else tree_programs(size, cut)
    return CollectiveProgram(what, how, size, cut, programs)


def has_two_levels(size: int, nodes: int) -> bool:
    """Whether ranks are spread over several nodes in equal numbers of two or more."""
    return nodes > 1 and size % nodes == 0 and size > nodes


def _require_nodes(size: int, nodes: int) -> None:
    if type(nodes) is not int or not has_two_levels(size, nodes):
        raise UsageError(
            f"two-level over {counted(size, 'rank')} on {nodes!r} nodes: give two nodes or more, with equally many "
            "ranks on each, two at least"
        )


def find_kind(name: str) -> CollectiveKind:
    """Return the kind of collective of this name; raises `UsageError`."""
    for kind in COLLECTIVE_KINDS:
        if kind == name:
            return kind
    raise UsageError(f"unknown collective {name!r}{suggest(name, COLLECTIVE_KINDS)}")


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name; raises `UsageError`."""
    for algorithm in ALGORITHMS:
        if algorithm == name:
            return algorithm
    raise UsageError(f"unknown algorithm {name!r}{suggest(name, ALGORITHMS)}")


def num_steps(kind: CollectiveKind, algorithm: Algorithm, size: int, chunks: int) -> int:
    """Return the number of steps in sequence, of one level; a rank sends and receives at most once in each."""
    return ring_steps(kind, size, chunks) if algorithm == "ring" else tree_chain(size, chunks)


def _require_spellable(kind: CollectiveKind, algorithm: Algorithm, size: int, chunks: int | None) -> int:
    """Return the number of chunks, checked; raises `UsageError` if there is no such collective."""
    if type(size) is not int or not 2 <= size <= MAX_SIZE:
        why = "there is nobody to exchange anything with" if size == 1 else f"it takes from 2 to {MAX_SIZE} ranks"
        raise UsageError(f"{algorithm} over an axis of size {size!r}: {why}")
    if algorithm == "tree" and kind != "all_reduce":
        raise UsageError(
            f"a tree cannot do {kind} over {counted(size, 'rank')}: all data would pass through its root; use ring, "
            "which sends no more than each rank needs"
        )
    default = TREE_CHUNKS if algorithm == "tree" and size > 2 else size
    found = default if chunks is None else chunks
    unit, what = (2, "2, one half for each tree") if algorithm == "tree" else (size, "the number of ranks")
    if type(found) is not int or not 0 < found <= MAX_CHUNKS or found % unit:
        raise UsageError(
            f"{algorithm} over {counted(size, 'rank')} in {found!r} chunks: give a multiple of {what}, at most "
            f"{MAX_CHUNKS}"
        )
    return found
