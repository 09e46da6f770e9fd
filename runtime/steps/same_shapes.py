"""Whether all ranks of ep have units of the same shapes in a step, so that mixtures which pad need not count rows.

A capacity follows from how many tokens there are, and each rank must know what the others send. Replicas may have
batches of other sizes and lengths, as at the end of an epoch; so they compare, once per step and before it.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch

from ..comm import Group, ReduceOp


class SameShapes:
    """Compares the steps of the ranks of ep.

    Args:
        group: these; None where no layer wants to know.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group if group is not None and group.size > 1 else None

    def agree(self, words: Callable[[], str]) -> bool:
        """Return whether `words` for a step are the same on all of them (collective); True where nobody asks."""
        if self._group is None:
            return True
        mark = int.from_bytes(blake2b(words().encode(), digest_size=7).digest())
        extremes = torch.tensor([mark, -mark], dtype=torch.int64).to(self._group.device, non_blocking=True)
        self._group.all_reduce(extremes, ReduceOp.MAX).wait()
        greatest, least = extremes.tolist()
        return bool(greatest == -least)
