"""Loss scaling for fp16: keeps small gradients above underflow; the sums, in float32, are unscaled.

    sum of losses x scale ──▶ backward in fp16 ──▶ sums in float32 ──▶ / (weight x scale) ──▶ norm, clip, step
                                              not finite: no rank steps, and the scale drops; otherwise it may grow

The scale and its update rule are those of a `torch.amp.GradScaler`, whose state always shows the scale in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quintsched.errors import UsageError

from ..comm.device import is_at_hand

SCALE = "engine.loss_scale"
"""Name of the scale in a state."""


class LossScale:
    """The loss scale and its updates; without a scaler it is always 1, and `scales` is False.

    Raises `UsageError` for an object that is no `GradScaler`.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise UsageError(
                f"grad_scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler, by which the engine "
                "scales, unscales and updates by itself: grad_scaler=torch.amp.GradScaler()"
            )
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.value = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self.scales = self._scaler is not None
        self._latest, self._key = torch.empty(0), tuple[Any, ...]()

    def gradient_of(self, loss: torch.Tensor, times: float) -> torch.Tensor:
        """Return the gradient that a backward starts with at a loss that counts `times` times.

        On the host, the previous tensor is reused if it is equal and unmodified.
        """
        key = type(loss), loss.dtype, loss.shape, self.value, times
        if key != self._key or self._latest._version:
            found = torch.full_like(loss, times if self.value == 1 else self.value)
            if self.value != 1 != times:
                found = found * times  # rounded as the gradient of a product is
            self._latest, self._key = found, key if type(loss) is torch.Tensor and is_at_hand(loss.device) else ()
        return self._latest

    def may_overflow(self, weight: float) -> bool:
        """Whether gradients may be non-finite only because of the scale, in a step of so much loss weight."""
        return self._scaler is not None and self.value * weight >= 1

    def update(self, *, skipped: bool) -> None:
        """Update the scale after a step; `skipped`: its gradient was not finite."""
        assert self._scaler is not None
        state: dict[str, Any] = self._scaler.state_dict()
        steps = 0 if skipped else state["_growth_tracker"] + 1
        if skipped:
            self.value *= state["backoff_factor"]
        elif steps == state["growth_interval"]:
            self.value, steps = min(self.value * state["growth_factor"], 2.0**127), 0  # torch's is a float32
        self._scaler.load_state_dict({**state, "scale": self.value, "_growth_tracker": steps})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the scale, and its number of steps without a change; {} without a scaler."""
        if self._scaler is None:
            return {}
        return {SCALE: torch.tensor([self.value, self._scaler.state_dict()["_growth_tracker"]], dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a result of `state_dict`, if it is in the state."""
        found = state.get(SCALE)
        if self._scaler is not None and found is not None:
            self.value, steps = found.tolist()
            self._scaler.load_state_dict(
                {**self._scaler.state_dict(), "scale": self.value, "_growth_tracker": int(steps)}
            )
