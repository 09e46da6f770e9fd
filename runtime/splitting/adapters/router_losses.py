"""Auxiliary router losses of transformers' mixture-of-experts models: over the router logits of all layers.

    layer k       its routers' logits, which transformers collects by hooks, travel along as "router<k>"
    last block    the model's own forward collects them from there ─▶ {"logits": …, "aux_loss": …} ─▶ `RouterLoss`

The loss is computed per microbatch, as the model's own forward computes it, and weighted by its number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...user_objects.library_or_user import arguments_of
from . import transformers_inputs_and_losses

KEY = "router_logits"
ASKS = "output_router_logits"
"""Name of the flag, in a forward or a configuration, that requests them."""


def asked(model: Any) -> bool:
    """Whether a model's loss has an auxiliary part of its routers."""
    return bool(getattr(model.config.get_text_config(), ASKS, False) or getattr(model.config, ASKS, False))


def watch(model: Any) -> None:
    """Install the library's hooks on a model's routers; raises `MisfitError` where it does not collect their logits."""
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
    """Return the name under which the router logits of a call of a layer travel."""
    return f"router{call}"


@contextmanager
def collecting(*, wanted: bool) -> Iterator[list[Tensor]]:
    """Collect router logits within a context, if they are `wanted`."""
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
    """Return the router logits of one layer, each (samples · tokens, experts), stacked with samples first."""
    if any(logits.dim() != 2 or logits.shape != found[0].shape for logits in found):
        raise MisfitError(f"the routers of a layer give unlike logits; set config.{ASKS} = False")
    together: Tensor = torch.stack(list(found), 1).unflatten(0, (samples, -1))
    return together


def give(logits: Tensor) -> None:
    """Pass what `joined` returned to the collector of the running forward."""
    _library()._active_collector.get()[KEY].extend(logits.flatten(0, 1).unbind(1))


def select(output: Any) -> Any:
    """Return the relevant part of a model's output: logits, and where requested, the routers' loss for each sample."""
    logits, loss = transformers_inputs_and_losses.select(output), output.get("aux_loss")
    return logits if loss is None else {"logits": logits, "aux_loss": loss.expand(len(logits))}


class RouterLoss:
    """Loss of a model including that of its routers.

    Args:
        model: the model.
        loss: that of its logits, as (sum, weight).
    """

    def __init__(self, model: Any, loss: Callable[..., Any]) -> None:
        self.coefficient, self._loss = _coefficient(model), loss

    def __call__(self, output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a microbatch, and its number of tokens."""
        total, weight = self._loss(output["logits"], labels)
        return total + self.coefficient * output["aux_loss"].mean() * weight, weight
