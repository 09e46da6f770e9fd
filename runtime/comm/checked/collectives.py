"""Collectives compared before they begin: gloo adds up whatever meets, also where ranks issue them in other orders.

    rank 0   all_reduce sum float32 (4,)   ─┐
    rank 1   all_gather float32 (4,)       ─┴▶ one all-gather of what each is about to do ─▶ MisfitError on both

This waits for all members before each collective, so it is for those who look for a fault (`runtime.verify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quintsched.errors import MisfitError

_WORDS_BYTES = 192
_MOST_SHOWN = 8

Gather = Callable[[Tensor, Tensor], None]
"""Fills (size × n) with the members' (n), and returns when that is done."""


class SameCollectives:
    """Compares what the members of a group are about to do.

    Args:
        ranks: the members.
        index: which of them this is.
        device: where their tensors live.
        gather: gathers bytes.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device, gather: Gather) -> None:
        self._ranks, self._index, self._device, self._gather = ranks, index, device, gather
        self._number = 0

    def require(self, words: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> None:
        """Raise `MisfitError` on all members unless all say the same, and send what the others expect (collective)."""
        self._number += 1
        told = f"{self._number}: {words}".encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES, b"\0")
        rows = torch.tensor([*sent, *received], dtype=torch.int64).view(torch.uint8)
        mine = torch.cat([torch.frombuffer(bytearray(told), dtype=torch.uint8), rows]).to(self._device)
        said = self._exchange(mine[:_WORDS_BYTES])
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]
        if len(set(texts)) > 1:
            each = [f"rank {rank} {text}" for rank, text in zip(self._ranks, texts, strict=True)]
            more = [f"and {len(each) - _MOST_SHOWN} more"] if len(each) > _MOST_SHOWN else []
            listed = "; ".join([*each[:_MOST_SHOWN], *more])
            raise MisfitError(f"ranks {list(self._ranks)} do not begin the same collective, by number: {listed}")
        if sent:
            self._require_rows(self._exchange(mine[_WORDS_BYTES:]))

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        gathered = mine.new_empty(len(self._ranks) * len(mine))
        self._gather(gathered, mine.contiguous())
        return list(gathered.cpu().split(len(mine)))

    def _require_rows(self, said: Sequence[Tensor]) -> None:
        size = len(self._ranks)
        tables = [row.view(torch.int64).tolist() for row in said]
        for source, table in enumerate(tables):
            for target in range(size):
                sends, expects = table[target], tables[target][size + source]
                if sends != expects:
                    raise MisfitError(
                        f"all_to_all {self._number} of ranks {list(self._ranks)}: rank {self._ranks[source]} sends "
                        f"{sends} rows to rank {self._ranks[target]}, which expects {expects}"
                    )
