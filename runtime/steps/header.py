"""What the first stage's rank tells the other ranks of its pipeline before each step: a few numbers, ahead of all else.

    stage 0   inputs ──▶ numbers: microbatches, samples, which text ──▶ computes
    stage 1              waits, knows the shapes of all that comes ──▶ posts receives, computes
    …

Only the first stage sees inputs, and theirs are the shapes that all others follow from. What the inputs are like is a
text, which is sent once and goes by its number from then on: in steps of one shape after the other there is one message
of a few bytes. It is the first thing of a step on all ranks of a pipeline, on a group of its own kind, so nobody waits
for anybody who could be waiting for him. A batch that cannot be cut is told likewise, and all refuse it in one voice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError

from ..comm import Group, Work

MOST_TEXTS = 1024
"""So many texts are remembered; all ranks forget the oldest at the same time."""

_ABOUT_TEXT = 3
"""So many numbers say what else there is to hear: whether it is a refusal, which text, and how long one that is new."""

_FINE, _MISFIT, _USAGE = range(3)
_REFUSALS: dict[int, type[MisfitError | UsageError]] = {_MISFIT: MisfitError, _USAGE: UsageError}


class Announcer:
    """One member's end of what the member at index `source` says to the group, in one message for what is known."""

    def __init__(self, group: Group, source: int, *, width: int) -> None:
        self._group, self._width = group, width
        self._speaks = group.index == source
        self._source = source
        self._heard = torch.zeros(_ABOUT_TEXT + width, dtype=torch.int64, device=group.device)
        self._texts: dict[str, int] = {}
        self._num_texts = 0
        self._under_way: list[Work] = []
        self._said: tuple[list[int], Tensor] = [], self._heard
        self._told: tuple[list[int], tuple[list[int], str]] = [], ([], "")

    def refuse(self, error: MisfitError | UsageError) -> bool:
        """Tell the others why there is no step, instead of `announce`; return whether the source goes on.

        A member that is not the source only listens, as that waits for it.
        """
        if self._speaks:
            self._send([0] * self._width, _MISFIT if isinstance(error, MisfitError) else _USAGE, str(error))
            return False
        try:
            self.announce([], "")
        except (MisfitError, UsageError):
            return False
        return True

    def announce(self, numbers: Sequence[int], text: str) -> tuple[list[int], str]:
        """Return what the source says; the others' arguments are not looked at.

        Raises the error that the source refuses the batch by.
        """
        if self._speaks:
            self._send(numbers, _FINE, text)
            return list(numbers), text
        heard = self._hear(self._heard)
        if heard == self._told[0]:
            return self._told[1]
        kind, number, length, *said = heard
        if length:
            text = bytes(self._hear(self._heard.new_zeros(length))).decode()
        else:
            text = next(known for known, its in self._texts.items() if its == number)
        if kind != _FINE:
            raise _REFUSALS[kind](text)
        if text not in self._texts:
            self._remember(text)
        self._told = [] if length else heard, (said, text)
        return self._told[1]

    def _send(self, numbers: Sequence[int], kind: int, text: str) -> None:
        """Tell the others, and go on at once; the source waits when it speaks again."""
        while self._under_way:
            self._under_way.pop().wait()
        number = self._texts.get(text, -1) if kind == _FINE else -1
        if self._group.size > 1:
            coded = b"" if number >= 0 else text.encode()
            said = [kind, number, len(coded), *numbers]
            if said != self._said[0]:
                self._said = said, torch.tensor(said).to(self._group.device, non_blocking=True)
            self._under_way.append(self._group.broadcast(self._said[1], self._source))
            if coded:
                whole = torch.tensor(list(coded)).to(self._group.device, non_blocking=True)
                self._under_way.append(self._group.broadcast(whole, self._source))
        if kind == _FINE and number < 0:
            self._remember(text)

    def _remember(self, text: str) -> None:
        if len(self._texts) >= MOST_TEXTS:
            del self._texts[next(iter(self._texts))]
        self._texts[text] = self._num_texts
        self._num_texts += 1

    def _hear(self, memory: Tensor) -> list[int]:
        """Return what the source says, for which there is memory."""
        self._group.broadcast(memory, self._source).wait()
        found: list[int] = memory.tolist()
        return found
