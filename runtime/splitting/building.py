"""Blocks of a model that no rank ever holds whole: it is built without weights, each rank makes those of its blocks.

    build() on the meta device ──▶ buffers made, by the model's own code ──▶ split as any model
    block k, on its ranks      ──▶ weights made, by the model's own code, under the engine's seed and k

A model's own code is `_init_weights` where it has that (transformers), else the `reset_parameters` of its modules. What
neither sets is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..blocks.blocks import on_meta

_UNSET = -1_234_567


def built_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with its weights on the meta device, and its buffers as they are."""
    model = on_meta(build)
    for name, module in model.named_modules():
        metas = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if metas:
            module._buffers.update({key: _unset(buffer) for key, buffer in metas.items()})
            _initialise(model, module)
            _require_set(f"{name}.{{}}", {key: module._buffers[key] for key in metas})
            _require_flags_set(model, name, module)
    return model


class BlockBuilder:
    """Makes a block with weights of its own.

    Args:
        model: the model without weights.
        make: returns the block of it, on the meta device.
    """

    def __init__(self, model: nn.Module, make: Callable[[], nn.Module]) -> None:
        self._model, self._make = model, make

    def __call__(self) -> nn.Module:
        """Return the block, its weights drawn from torch's global generator; where that is the meta device, without."""
        block = copy.deepcopy(self._make())
        if torch.get_default_device().type == "meta":
            return block
        made: dict[int, nn.Parameter] = {}
        for module in block.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in made:
                        made[id(parameter)] = nn.Parameter(_unset(parameter), parameter.requires_grad)
                    module._parameters[key] = made[id(parameter)]
        for module in reversed(list(block.modules())):
            _initialise(self._model, module)
        _require_set("{}", dict(block.named_parameters()))
        return block


def materialised(model: nn.Module) -> nn.Module:
    """Return the whole model with weights of its own, as it is proved."""
    return BlockBuilder(model, lambda: model)()


@torch.no_grad()
def _initialise(model: Any, module: nn.Module) -> None:
    """Let a module's weights and buffers be what the model starts from."""
    if hasattr(model, "_init_weights"):
        model._init_weights(module)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _unset(like: Tensor) -> Tensor:
    """Return a tensor on the CPU that shows whether it was set."""
    if like.dtype is torch.bool:
        return torch.zeros(like.shape, dtype=torch.bool)
    if like.is_floating_point() or like.is_complex():
        return torch.full(like.shape, torch.nan, dtype=like.dtype)
    return torch.full(like.shape, _UNSET if like.dtype.itemsize > 2 else 0, dtype=like.dtype)


def _require_flags_set(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise `MisfitError` for a buffer of flags that is left as it is, whatever it is."""
    flags = {key: b.clone() for key, b in module._buffers.items() if b is not None and b.dtype is torch.bool}
    for key, before in flags.items():
        buffer = module._buffers[key]
        assert buffer is not None
        buffer.logical_not_()
        _initialise(model, module)
        if not torch.equal(buffer, before):
            raise MisfitError(f"nothing sets '{name}.{key}' when a model is built without weights; use split(model)")


def _require_set(form: str, tensors: dict[str, Any]) -> None:
    for key, tensor in tensors.items():
        numbers = tensor.detach()
        unset = numbers.isnan() if numbers.is_floating_point() or numbers.is_complex() else numbers == _UNSET
        if numbers.numel() and bool(unset.any()):
            raise MisfitError(
                f"nothing sets {form.format(key)!r} when a model is built without weights; build it with weights, "
                "split(model), or set it in `reset_parameters` of its module"
            )
