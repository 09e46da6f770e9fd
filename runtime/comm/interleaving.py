"""How the overlapping computations of one rank run: noted in the first step, side by side from then on.

    step 0    Fwd alone, then Bwd alone          what each waited for inside its stage is noted
              all holders of the stages agree    by a hash of the notes
    step 1…   both, in the turns that follow from how often each waits

So the order is settled before anything overlaps, and is the same on all replicas. Where a side waits for nobody, the
two simply run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .sides import Side, Sides, interleave

Call = Callable[[], None]


class Overlaps:
    """The pairs of one rank's program.

    Args:
        sides: the rank's.
        device: where it computes.
    """

    def __init__(self, sides: Sides, device: torch.device) -> None:
        self._sides, self._device = sides, device
        self._noted: dict[tuple[Side, int], list[str]] = {}
        self._turns: dict[tuple[int, int], Sequence[Side]] | None = None
        self._pairs: set[tuple[int, int]] = set()

    def pair(self, forward: Call, backward: Call, stages: tuple[int, int]) -> Call:
        """Return what runs a forward and a backward, of these two stages, side by side."""
        self._pairs.add(stages)

        def run() -> None:
            if self._turns is None:
                self._note(Side.FORWARD, stages[0], forward)
                self._note(Side.BACKWARD, stages[1], backward)
                return
            turns = self._turns[stages]
            if turns:
                self._sides.run(forward, backward, turns, self._device)
            else:
                forward()
                backward()

        return run

    @property
    def unsettled(self) -> str | None:
        """What was noted, in words, until the turns are settled; None afterwards, and where nothing overlaps."""
        return str(sorted(self._noted.items())) if self._pairs and self._turns is None else None

    def settle(self) -> None:
        """Settle in which turns each pair runs, after all holders of the stages have noted the same."""
        self._turns = {pair: self._settled(*pair) for pair in self._pairs}

    def _settled(self, forward: int, backward: int) -> Sequence[Side]:
        waits = (len(self._noted[Side.FORWARD, forward]), len(self._noted[Side.BACKWARD, backward]))
        return interleave(waits) if all(waits) else ()

    def _note(self, side: Side, stage: int, call: Call) -> None:
        self._noted[side, stage] = self._sides.note(side, call)
