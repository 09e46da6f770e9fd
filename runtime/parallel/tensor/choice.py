"""How a block is cut where names alone do not decide: what a proof has chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from .rules import Rules


@dataclass(frozen=True)
class Choice:
    """How one block is cut over tp.

    Attributes:
        rules: beyond those of the user, by names in the whole model.
        partial: names, in the block, of weights that are not cut and whose gradients are partial sums on the ranks.
        slices: whether the block is given a slice of the tokens, where tokens are sliced.
        gathers_before: whether tokens are then gathered where they enter the module of a pair's columns.
        proved: first columns of pairs that were proved, by names in the whole model.
    """

    rules: Rules = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    slices: bool = True
    gathers_before: bool = False
    proved: frozenset[str] = frozenset()
