"""Gradients that replicas share out (ZeRO): each keeps the sum of its own share of every piece.

    stage 1         backwards ─▶ [   full gradients   ] ─ reduce-scatter once ─▶ own share of the sum, in place
    stages 2, 3     backward  ─▶ [   full gradients   ] ─ reduce-scatter ─▶ added to the own share, full ones dropped
                    backward  ─▶ [   full gradients   ] ─ …

Full gradients of stages 2 and 3 stand from a backward to the end of its reduction, which is waited for before the next
backward or gathering of weights on this rank: others take their room. A gradient that comes where its piece is not
expected, from the first half of a backward, makes room by itself. Where gradients are in parts on the ranks of tp, own
shares are added up over tp at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm import Group, Work
from .grad_buckets import Piece, attach
from .master_weights import Masters
from .memory_stats import Held, Ledger, Room
from .zero_params import WeightShare


class SharedPiece(Piece):
    """A piece whose gradients become everybody's share of their sum; `comes_and_goes` says how long they stand full."""

    def __init__(self, share: WeightShare, masters: Masters, *, comes_and_goes: bool, ledger: Ledger) -> None:
        self._layout = share.layout
        self._segments = share.segments
        self.comes_and_goes = comes_and_goes and share.layout.parts > 1
        self._ledger = ledger
        super().__init__(share.bucket, share.parameters, masters)
        if self.comes_and_goes:
            self._leave()

    def _lay_out(self, local: list[Tensor], dtype: torch.dtype, masters: Masters) -> None:
        self.flat = torch.zeros(self._layout.size, dtype=dtype, device=local[0].device)
        self.views = self._layout.views(self.flat)
        self._scattered = self._layout.own(self.flat)
        self.own = torch.zeros_like(self._scattered) if self.comes_and_goes else self._scattered
        self._room = Room(self.flat, Held.GRADIENTS, self._ledger)
        if self.comes_and_goes:
            Room(self.own, Held.GRADIENTS, self._ledger)
        self._full = [(p, view) for p, view in zip(self.parameters, self.views, strict=True) if p.dtype == dtype]
        self._homes = [
            (segment, self.own[found.at : found.at + found.stop - found.start])
            for segment, found in zip(self._segments, self._layout.segments(), strict=True)
            if segment is not None and found is not None
        ]

    def attach(self) -> None:
        """Let every segment's gradient be in the own share, and that of whole weights where they are added up."""
        super().attach()
        if not self.comes_and_goes or self._room.stands:
            attach(self._full)

    def make_room(self) -> None:
        """Let full gradients stand, zero at first."""
        if self.comes_and_goes and not self._room.stands:
            self._room.take()
            self.flat.zero_()
            attach(self._full)

    def reduce(self, group: Group) -> Work:
        """Begin to sum what was added up since the last time, everybody a share."""
        self.make_room()
        return group.reduce_scatter(self._scattered, self.flat)

    def collect(self) -> None:
        """Add what has been reduced to the own share, and let go of full gradients."""
        if self.comes_and_goes:
            self.own.add_(self._scattered)
            self._leave()

    def counted(self, counts: Sequence[bool]) -> list[Tensor]:
        """Return the own share of the parameters that count."""
        if all(counts):
            return [self.own]
        return [
            self.own[found.at : found.at + found.stop - found.start]
            for found, here in zip(self._layout.segments(), counts, strict=True)
            if found is not None and here
        ]

    def clear(self) -> None:
        """Begin again at zero."""
        self.own.zero_()
        if self._room.stands:
            self.flat.zero_()
        self.missing, self.ready = set(self.parameters), False

    def _leave(self) -> None:
        for parameter, _ in self._full:
            parameter.grad = None
        self._room.drop()
