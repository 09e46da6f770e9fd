"""Models with PEFT's adapters, of which the wrapper is left out."""

from __future__ import annotations

from torch import nn

from quintsched.errors import UsageError


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
