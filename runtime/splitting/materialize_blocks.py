"""Blocks of a model that no rank holds whole: it is built on the meta device, each rank materializes its own blocks.

    build() on the meta device ──▶ buffers made, by the model's own code ──▶ split as any model
    block k, on its ranks      ──▶ weights made, by the model's own code, under the engine's seed and k

A model's own code is `_init_weights` where it has that (transformers), else the `reset_parameters` of its modules.
Tensors that neither initializes are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..blocks.block_builders import on_meta
from ..comm.random_generators import draws_undone

_UNSET = -1_234_567


def built_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with its weights on the meta device, and its buffers materialized."""
    model = on_meta(build)
    for name, module in model.named_modules():
        metas = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        one, other = (_set_buffers(model, module, metas, start) for start in (0, 1)) if metas else ({}, {})
        for key, buffer in one.items():
            if not torch.equal(buffer, other[key]):
                raise _nothing_sets(f"{name}.{key}")
    return model


def _set_buffers(model: nn.Module, module: nn.Module, metas: dict[str, Tensor], start: int) -> dict[str, Tensor]:
    """Return a module's buffers as its code initializes them from buffers filled with one number."""
    module._buffers.update({key: torch.full_like(buffer, start, device="cpu") for key, buffer in metas.items()})
    with draws_undone():
        _initialise(model, module)
    return {key: module._buffers[key].nan_to_num().clone() for key in metas}  # type: ignore[union-attr]


def materialised(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a block of a model without weights, or all of it, with initialized weights.

    `make` returns it on the meta device. Weights are drawn from torch's global generator; where the default device is
    the meta device, it is returned as it is.
    """
    block = copy.deepcopy(make())
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
        _initialise(model, module)
    unset = next((n for n, p in block.named_parameters() if bool((p.isnan() | (p == _UNSET)).any())), None)
    if unset is not None:
        raise _nothing_sets(unset)
    return block


@torch.no_grad()
def _initialise(model: Any, module: nn.Module) -> None:
    """Initialize a module's weights and buffers by the model's own code."""
    if hasattr(model, "_init_weights"):
        model._init_weights(module)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _unset(like: Tensor) -> Tensor:
    """Return a weight on the CPU filled with a marker, by which an uninitialized one is found."""
    of_whole = _UNSET if like.dtype.itemsize > 2 else 0
    is_real = like.is_floating_point() or like.is_complex()
    return torch.full(like.shape, torch.nan if is_real else of_whole, dtype=like.dtype)


def _nothing_sets(name: str) -> MisfitError:
    return MisfitError(
        f"nothing sets {name!r} when a model is built without weights; build it with weights, split(model), or set it "
        "in `reset_parameters` of its module"
    )
