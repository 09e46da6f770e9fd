"""What a loss goes by besides outputs and targets, watched from step to step: a loop may change what it is over.

    alpha, reduction, weight     attributes, closures and globals of plain values, tensors     `blocks.host_state`

What the loss changes itself while it is called is taken as it is behind each step.
"""

from __future__ import annotations

from typing import Any

from ..blocks.host_state import HostState


class LossState:
    """What a function goes by, as it is now."""

    def __init__(self, function: Any) -> None:
        self._state = HostState({}, {"the loss": function})
        self._tensors = [(tensor, tensor._version) for tensor in self._state.tensors() if not tensor.is_inference()]
        self._state.let_go()

    def changed(self) -> str | None:
        """Return the name of something that is another now; None where all is as it was."""
        if any(tensor._version != version for tensor, version in self._tensors):
            return "a tensor that the loss goes by"
        return self._state.changed()
