"""Refusal of a step that some ranks cannot begin: the same error on all ranks, or an error of one rank's own code.

all ranks, or a whole pipeline        a batch that no block takes    ─▶ MisfitError on all ranks, in the same words
one rank of several alike             its code raised there alone    ─▶ CodeError on that rank; the others wait for it,
                                                                        and are notified when it ends, as of any rank
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from quintsched.errors import CodeError, MisfitError, UsageError, listed_ranks
from quintsched.ir.mesh import Mesh
from quintsched.stalls.own_errors import failed_in_code

from ..comm import Group
from ..comm.host_collectives import ControlGroup, first_said, share_texts
from .error_location import rank_in_words

JointRefusal = MisfitError | UsageError


def refuse_together(problem: JointRefusal | None, world: Group, alike: Group, mesh: Mesh) -> None:
    """Raise, on all ranks, where some of them have a problem (collective over all).

    `alike`: the ranks that compute the same as this one, which is among them.
    """
    if not first_said("" if problem is None else str(problem), world):
        return
    peers = alike.ranks if alike.size > 1 else world.ranks
    mine = "" if problem is None else json.dumps([str(problem), failed_in_code(problem), list(peers)])
    told = {rank: json.loads(text) for rank, text in zip(world.ranks, share_texts(world, mine), strict=True) if text}
    alone = [rank for rank, (_, in_code, its) in told.items() if in_code and any(peer not in told for peer in its)]
    rank = world.ranks[world.index]
    if rank in alone and problem is not None:
        kind = type(problem.__cause__).__name__
        who, others = rank_in_words(mesh, rank), "other ranks that compute the same did not fail"
        raise CodeError(f"{who}, {kind}: {problem}; {others}") from problem.__cause__
    if alone:
        ControlGroup(world).barrier()  # the failed ranks never reach this barrier: wait until their end is noticed
    raise problem or MisfitError(_words(told))


def _words(told: dict[int, Sequence[str]]) -> str:
    """Return the message of the first rank with a problem, and the ranks with the same message."""
    words = next(iter(told.values()))[0]
    return f"{listed_ranks([rank for rank, theirs in told.items() if theirs[0] == words])}: {words}"
