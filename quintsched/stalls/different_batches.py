"""Comparison of the batches that ranks of one replica were given: other data explains the errors that follow.

rank 0    samples 4    Fwd, all-reduce over tp     gloo aborts a process, or blocks forever
rank 1    samples 8    Fwd, all-reduce over tp     a loss gets outputs and targets of different lengths
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintsched.errors import counted, listed_ranks
from quintsched.ir.mesh import Mesh
from quintsched.stalls.last_reported_rank_states import GivenBatch, RankState


@dataclass(frozen=True)
class OtherData:
    """Ranks that were given other data than the majority of their replica; all ranks if there is no majority.

    `said` describes the data of each rank.
    """

    ranks: tuple[int, ...]
    said: str


def find_other_data(mesh: Mesh, states: Mapping[int, RankState], near: Sequence[int]) -> OtherData | None:
    """Return the ranks with other data for the latest batch, in the replicas of `near` (or all if empty), or None."""
    replicas: dict[tuple[int, int], list[int]] = {}
    for rank in states:
        where = mesh.coordinates(rank)
        replicas.setdefault((where.get("dp", 0), where.get("ep", 0)), []).append(rank)
    for ranks in replicas.values():
        if not near or not set(near).isdisjoint(ranks):
            given = {rank: states[rank].given for rank in ranks}
            latest = max(one.number for one in given.values())
            found = _compare({rank: one for rank, one in given.items() if one.number == latest > 0})
            if found is not None:
                return found
    return None


def _compare(given: Mapping[int, GivenBatch]) -> OtherData | None:
    lengths = {one.length for one in given.values() if one.samples}
    by_samples = {
        rank: f"{counted(one.samples, 'sample')}" + f" of length {one.length}" * (len(lengths) > 1)
        for rank, one in given.items()
        if one.samples
    }
    by_targets = {rank: f"targets of {counted(one.targets, 'row')}" for rank, one in given.items() if one.targets}
    for by_rank in (by_samples, by_targets):
        counts = Counter(by_rank.values()).most_common()
        if len(counts) < 2:
            continue
        said = ", and ".join(_said([rank for rank in by_rank if by_rank[rank] == what], what) for what, _ in counts)
        if 2 * counts[0][1] > len(by_rank):
            return OtherData(tuple(rank for rank, what in by_rank.items() if what != counts[0][0]), said)
        return OtherData(tuple(by_rank), f"{said}; nobody can be told from the other{'s' * (len(by_rank) > 2)}")
    return None


def _said(ranks: Sequence[int], what: str) -> str:
    return f"{listed_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} given {what}"
