"""Adapters of PEFT: the model inside of its wrapper, and the names by which PEFT saves an adapter's weights.

model                   model.layers.0.self_attn.q_proj.lora_A.default.weight
adapter_model file      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from quintsched.errors import UsageError

_PREFIX = "base_model.model."


class Adapter(NamedTuple):
    """An adapter as PEFT saves it: `names`, from the model's own to those in the file; its configuration.

    `others` are further adapters of the model, which no file is written for.
    """

    names: Mapping[str, str]
    config: Any
    others: tuple[str, ...] = ()


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model inside of a PEFT wrapper, with its adapters; the wrapper adds no computation."""
    configs, base = getattr(model, "peft_config", None), getattr(model, "get_base_model", None)
    if configs is None or not callable(base):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise UsageError(
            f"the {type(model).__name__} puts prompts before its inputs, outside of the model's own forward; split a "
            "model with adapters in its layers, such as LoRA"
        )
    found: nn.Module = base()
    return found


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the adapter of a model, in a wrapper or added by transformers; None: it has none."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    (name, config), *others = configs.items()
    tensors = {own: tensor.detach() for own, tensor in model.state_dict().items()}  # a tensor for each name
    owners = {id(tensor): own for own, tensor in tensors.items()}
    saved = import_module("peft").get_peft_model_state_dict(
        model, state_dict=tensors, adapter_name=name, save_embedding_layers=False
    )
    names = {
        owners[id(tensor)].removeprefix(_PREFIX): _PREFIX + called.removeprefix(_PREFIX)
        for called, tensor in saved.items()
        if id(tensor) in owners
    }
    return Adapter(names, config, tuple(other for other, _ in others))
