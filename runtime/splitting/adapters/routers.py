"""Losses of routers as transformers has them: of the router logits of all layers at once, found behind the last one.

    layer k       its routers' logits, which transformers collects by hooks, ride along as "router<k>"
    last block    the model's own forward collects them from there ─▶ {"logits": …, "aux_loss": …} ─▶ `RouterLoss`

The loss is found for each microbatch, as the model's own forward finds it, and weighs as much as the tokens of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...objects.user_code import arguments_of
from . import transformers

KEY = "router_logits"
ASKS = "output_router_logits"
"""The name by which a forward, or a configuration, is asked for them."""


def asked(model: Any) -> bool:
    """Whether a model's loss has a part that its routers make."""
    return bool(getattr(model.config.get_text_config(), ASKS, False) or getattr(model.config, ASKS, False))


def watch(model: Any) -> None:
    """Let the routers of a model be heard; raises `MisfitError` where the library does not collect their logits."""
    heard = []
    if type(model).__name__.endswith("ForCausalLM") and ASKS in arguments_of(model.forward):
        library = _library()
        heard = [m for m in model.modules() if library is not None and KEY in _recorded(library, m)]
    for module in heard:
        library.maybe_install_capturing_hooks(module)
    if not heard or _coefficient(model) is None:
        raise MisfitError(
            f"{ASKS} adds a loss of the routers to the model's own, which is not known for {type(model).__name__}; set "
            f"config.{ASKS} = False"
        )


def _library() -> Any:
    try:
        return import_module("transformers.utils.output_capturing")
    except ImportError:  # older versions return the logits from layer to layer
        return None


def _recorded(library: Any, module: nn.Module) -> Any:
    is_model = isinstance(module, import_module("transformers").PreTrainedModel)
    return library._CAN_RECORD_REGISTRY.get(module) if is_model else ()


def _coefficient(model: Any) -> float | None:
    name = "router_aux_loss_coef"
    places = ((model, name), (model, "aux_loss_coef"), (model.config.get_text_config(), name))
    found: float | None = next((getattr(place, name) for place, name in places if hasattr(place, name)), None)
    return found


def rider(call: int) -> str:
    """Return the name by which the logits travel of the routers in a call of a layer."""
    return f"router{call}"


@contextmanager
def collecting(*, wanted: bool) -> Iterator[list[Tensor]]:
    """A context in which the logits of routers are collected, if they are `wanted`."""
    found = list[Tensor]()
    if not wanted:
        yield found
        return
    collector = _library()._active_collector
    token = collector.set({KEY: found})
    try:
        yield found
    finally:
        collector.reset(token)


def joined(found: Sequence[Tensor], samples: int) -> Tensor:
    """Return the logits of the routers of one layer, (samples · tokens, experts), as one: samples first."""
    if any(logits.dim() != 2 or logits.shape != found[0].shape for logits in found):
        raise MisfitError(f"the routers of a layer give unlike logits; set config.{ASKS} = False")
    together: Tensor = torch.stack(list(found), 1).unflatten(0, (samples, -1))
    return together


def give(logits: Tensor) -> None:
    """Let the forward that runs collect what `joined` gave."""
    _library()._active_collector.get()[KEY].extend(logits.flatten(0, 1).unbind(1))


def select(output: Any) -> Any:
    """Return what counts of a model's output: logits, and where it was asked for, the routers' loss for each sample."""
    logits, loss = transformers.select(output), output.get("aux_loss")
    return logits if loss is None else {"logits": logits, "aux_loss": loss.expand(len(logits))}


class RouterLoss:
    """The loss of a model with that of its routers.

    Args:
        model: the model.
        loss: that of its logits, as (sum, weight).
    """

    def __init__(self, model: Any, loss: Callable[..., Any]) -> None:
        self.coefficient, self._loss = _coefficient(model), loss

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a microbatch, summed, and how many tokens it is of."""
        total, weight = self._loss(output["logits"], labels)
        return total + self.coefficient * output["aux_loss"].mean() * weight, weight
