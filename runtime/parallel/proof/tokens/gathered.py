"""Followed where `sequence_parallel` slices tokens over tp: pairs are given all, and give slices of what they make.

x, sliced ─▶ norm ─▶ (all) column … row (sliced) ─▶ + x
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....blocks.blocks import TOKENS
from ....settings.tensor_rules import TensorSplit
from ...tensor.cuts import Cut, pairs_of
from ..marks.owner_rules import Joined
from .token_owners import MANY, Marked, TokenOwners


@dataclass(frozen=True)
class Gathered:
    """Where tokens are gathered and sliced again.

    Attributes:
        cuts_of: finds the cuts of a twin.
        gathers_before: whether tokens are gathered where they enter the module of a pair's columns.
    """

    cuts_of: Callable[[nn.Module], Sequence[Cut]]
    gathers_before: bool

    @contextmanager
    def around(self, twin: nn.Module, owners: TokenOwners, vector: Tensor, told: list[Marked]) -> Iterator[None]:
        """A context in which a twin's pairs do so; what is gathered is noted in `told`, or taken from it by a part."""
        is_part, cuts = bool((vector == 0).any()), self.cuts_of(twin)  # before hooks: what has some is not cut

        def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
            name = "" if args else "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            given: Tensor = kwargs[name] if name else args[0]
            with owners.unfollowed():
                if is_part and not told:
                    raise Joined("calls its pairs another number of times where tokens are sliced")
                owners.show("pair", given)
                if not is_part:
                    told.append(owners.marked(given))
                whole, labels = told.pop(0) if is_part else (given.clone(), told[-1][1])
                common = owners.note_common(given, whole, labels)
            return (args, {**kwargs, name: common}) if name else ((common, *args[1:]), kwargs)

        def scatter(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            with owners.unfollowed():
                here = vector.nonzero()[:, 0]
                mine = result.index_select(TOKENS, here) if is_part else result
                owners.labels.note(mine, owners.labels.of(result).index_select(TOKENS, here))
                shape = [-1 if dim == TOKENS else 1 for dim in range(mine.dim())]
                many = bool((owners.of(result) == MANY).any())
                of = torch.full_like(vector[vector != 0], MANY) if many else vector[vector != 0]
                owners.note(mine, of.reshape(shape).expand(mine.shape))
            return mine

        handles = [module.register_forward_pre_hook(gather, with_kwargs=True) for module in self._entries(twin, cuts)]
        rows = [cut for cut in cuts if cut.is_paired and cut.split is TensorSplit.ROW]
        handles += [cut.layer.register_forward_hook(scatter) for cut in rows]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entries(self, twin: nn.Module, cuts: Sequence[Cut]) -> list[nn.Module]:
        """Return the modules before which tokens are gathered."""
        entries: dict[int, nn.Module] = {}
        for pair in pairs_of(cuts):
            owner = pair[0].owners[0] if pair[0].is_paired else twin
            columns = [cut.layer for cut in pair if cut.is_paired and cut.split is TensorSplit.COLUMN]
            chosen = [owner] if self.gathers_before and columns and owner is not twin else columns
            entries |= {id(module): module for module in chosen}
        return list(entries.values())
