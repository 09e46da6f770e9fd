"""Header of a step: the first stage's rank broadcasts a few numbers to its pipeline, before any other message.

    stage 0   inputs ──▶ numbers: microbatches, samples, index of a text ──▶ computes
    stage 1              waits, knows the shapes of all messages ──▶ posts receives, computes
    …

Only the first stage gets inputs, and the shapes on all other stages follow from theirs. The specs of the inputs are a
text, which is sent once and then referred to by its index: steps of one shape send one message of a few bytes. It is
the first operation of a step on all ranks of a pipeline, on a group of its own, so that no two ranks can wait for each
other. A batch that cannot be split is announced in the same way, and all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError

from ..comm import Group, Work
from ..comm.device import is_accelerator, numbers_of

MOST_TEXTS = 1024
"""Texts that are cached; all ranks evict the oldest at the same time."""

_ABOUT_TEXT = 3
"""Leading numbers of a message: kind (fine or refusal), index of the text (-1: new), length in bytes of a new text."""

_FINE, _MISFIT, _USAGE = range(3)
_REFUSALS: dict[int, type[MisfitError | UsageError]] = {_MISFIT: MisfitError, _USAGE: UsageError}


class Announcer:
    """Broadcast of numbers and a cached text from the member at index `source`, in one message if the text is known."""

    def __init__(self, group: Group, source: int, *, width: int) -> None:
        self._group, self._width = group, width
        self._speaks = group.index == source
        self._source = source
        self._heard = torch.zeros(_ABOUT_TEXT + width, dtype=torch.int64, device=group.device)
        self._texts: dict[str, int] = {}
        self._num_texts = 0
        self._under_way: list[Work] = []
        self._said: tuple[list[int], Tensor] = [], self._heard
        self._told: tuple[list[int], tuple[Sequence[int], str]] = [], ([], "")
        self._read = self._heard.tolist if is_accelerator(group.device) else numbers_of(self._heard).tolist

    def refuse(self, error: MisfitError | UsageError) -> bool:
        """Announce a refusal instead of a step; return whether the source begins the step.

        Other members only receive, as the source waits for them.
        """
        if self._speaks:
            self._send([0] * self._width, _MISFIT if isinstance(error, MisfitError) else _USAGE, str(error))
            return False
        try:
            self.announce([], "")
        except (MisfitError, UsageError):
            return False
        return True

    def announce(self, numbers: Sequence[int], text: str) -> tuple[Sequence[int], str]:
        """Return the numbers and text of the source; arguments of other members are ignored.

        Raises the error with which the source refuses the batch.
        """
        if self._speaks:
            self._send(numbers, _FINE, text)
            return numbers, text
        self._group.broadcast(self._heard, self._source).wait()
        heard: list[int] = self._read()
        if heard == self._told[0]:
            return self._told[1]
        kind, number, length, *said = heard
        if length:
            memory = self._heard.new_zeros(length)
            self._group.broadcast(memory, self._source).wait()
            text = bytes(memory.tolist()).decode()
        else:
            text = next(known for known, its in self._texts.items() if its == number)
        if kind != _FINE:
            raise _REFUSALS[kind](text)
        if text not in self._texts:
            self._remember(text)
        self._told = [] if length else heard, (said, text)
        return self._told[1]

    def _send(self, numbers: Sequence[int], kind: int, text: str) -> None:
        """Start the broadcasts without waiting; the source waits for them before its next message."""
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
