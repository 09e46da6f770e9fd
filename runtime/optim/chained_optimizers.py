"""Several optimizers of a rank combined into one, and a learning rate scheduler for each.

Muon  [matrices] ─┐                         engine.lr_schedulers(lambda optimizer: CosineAnnealingLR(optimizer, 100))
                  ├─ ChainedOptimizers          one for each of them; none on a rank without parameters
AdamW [the rest] ─┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .optimizer_extra_state import settings_of


class ChainedOptimizers(Optimizer):
    """Optimizers that step together: `parts`; `param_groups` are those of all parts, in order."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of all parts: the same dicts, so that setting a learning rate takes effect."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Per-parameter state of all parts."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all parts."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters; the engine sets them again."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part, by its index."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(number)])


def chained(parts: Sequence[Optimizer]) -> Optimizer:
    """Return several optimizers as one; a single one unchanged."""
    return parts[0] if len(parts) == 1 else ChainedOptimizers(parts)


def parts_of(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers with chained ones replaced by their parts."""
    return [
        part
        for optimizer in optimizers
        for part in (optimizer.parts if isinstance(optimizer, ChainedOptimizers) else (optimizer,))
    ]


class LRSchedulers:
    """Learning rate schedulers, one for each optimizer of a rank; none where it has none."""

    def __init__(self, make: Callable[[Optimizer], Any], optimizers: Iterable[Optimizer]) -> None:
        self.schedulers = [make(part) for part in parts_of(optimizers)]

    def step(self, *given: Any) -> None:
        """Step all of them; `given` is passed on, such as the loss for `ReduceLROnPlateau`."""
        for scheduler in self.schedulers:
            scheduler.step(*given)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of all groups of this rank."""
        return [rate for scheduler in self.schedulers for rate in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by its index, and the settings of its optimizer's groups.

        Settings include more than learning rates: `OneCycleLR` and `CyclicLR` change the momentum as well.
        """
        return {
            str(number): {
                "scheduler": scheduler.state_dict(),
                "groups": [deepcopy(settings_of(group)) for group in scheduler.optimizer.param_groups],
            }
            for number, scheduler in enumerate(self.schedulers)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` from the same mesh, and restore the groups' settings."""
        for number, scheduler in enumerate(self.schedulers):
            given = state_dict[str(number)]
            scheduler.load_state_dict(given["scheduler"])
            for group, settings in zip(scheduler.optimizer.param_groups, given["groups"], strict=True):
                for key, value in settings.items():
                    here = group.get(key)
                    group[key] = here.copy_(torch.as_tensor(value)) if isinstance(here, Tensor) else deepcopy(value)
