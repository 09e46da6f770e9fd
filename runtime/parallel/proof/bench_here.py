"""Twins run on this rank alone, cut for each rank of tp in turn: in later steps ranks may be given unlike units.

whole ──────────────────────────────┐
cut for rank 0 ─┐ in one process,   ├─▶ the same outputs and gradients?
cut for rank 1 ─┴ collectives too ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from quintsched.errors import StallError

from ...comm import EchoGroup
from ...comm.local.in_turns import run_in_turns
from ..dropout import CutSite
from ..tensor.choice import Choice
from ..tensor.sequence import SequenceParallel
from .arrivals import Arrival
from .bench import Bench, Finding, Kind
from .reads.drawn_parts import unusual_parts
from .trial import Figures, Setting


class BenchHere(Bench):
    """A bench that sends nothing: what the other ranks of tp do is done here, one after the other."""

    def unsound_again(self, kind: Kind, arrival: Arrival, *, is_asked: bool) -> Finding | None:
        """Return why a kind's pairs may be none as the block is now, given this; None: they are."""
        finding = self.unlike(kind, arrival, Setting(tensor=self.group), kind.choice)
        return finding or self.unsound(kind, arrival, kind.choice, is_asked=is_asked)

    def has_pairs(self, kind: Kind) -> bool:
        """Whether columns and rows of a kind's blocks feed each other."""
        return not kind.is_parted and bool(self._pairs(kind, kind.choice))

    def cut_outline(self, kind: Kind, outline: nn.Module, *, slices: bool) -> list[nn.Module]:
        """Return a block on the meta device as a rank has it, with what slices tokens around it if they are sliced."""
        group = EchoGroup(self.group.size, self.group.device)
        block = self._cut(kind, outline, group, kind.choice, slices=slices)
        return SequenceParallel([slices], group).around(0, block)

    def why_tokens_meet(self, kind: Kind, arrival: Arrival, setting: Setting) -> str:
        """Return why tokens of several ranks, or slices, may meet in a kind: "it …"; over tp, by numbers as well."""
        found = super().why_tokens_meet(kind, arrival, setting)
        for trains in (True, False) if setting.slices_tokens and not found else ():
            sliced = Setting(tensor=self.group, slices_tokens=True, trains=trains)
            found = found or str(self.unlike(kind, arrival, sliced, kind.choice) or "")
        return found

    def unusual_draws(self, kind: Kind, arrival: Arrival, setting: Setting) -> dict[CutSite, int | None]:
        """Return where a kind draws for unusual parts of tensors (see `unusual_parts`).

        Raises `MisfitError` where that is not the same at each call.
        """
        group, sliced = self.group, setting.slices_tokens
        try:
            whole = self.note_draws(kind, arrival, Setting(), kind.choice)
            if not whole:
                return {}
            of_one = self.note_draws(kind, arrival.of_sample(), Setting(), kind.choice)
            cut = run_in_turns(
                group.size,
                group.device,
                lambda mine: Bench(mine, self.rules).note_draws(kind, arrival, Setting(mine, sliced), kind.choice),
            )[group.index]
        except Exception:  # it is proved besides, or not
            return {}
        rows = arrival.activation.parts[0].tensor.shape[:2].numel()
        found = unusual_parts(whole, of_one, cut, group.size, rows)
        return {site: dim for site, dim in found.items() if sliced or site[1]}

    def find(self, kind: Kind, arrival: Arrival, setting: Setting, whole: Figures, choice: Choice) -> Finding | None:
        """Run a kind's twin cut for each rank; return what is off, if anything."""
        group = self.group
        try:
            return run_in_turns(
                group.size,
                group.device,
                lambda mine: Bench(mine, self.rules).find(kind, arrival, replace(setting, tensor=mine), whole, choice),
            )[0]
        except StallError as error:
            return Finding(off=float("inf"), trouble=f"ranks of tp do other things: {error}")

    def most(self, numbers: Sequence[float], setting: Setting) -> list[float]:
        """Return the numbers: there are no other ranks."""
        return list(numbers)
