"""Copies of a block with random weights: they can be run without touching what is trained.

    block ──▶ blueprint: all but its weights ──▶ twin, drawn by a seed: the same on all ranks

Weights are drawn, not taken: what starts at zero or nearly so (the last product of a block, a scale of 1e-5) would hide
what is cut wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from ...blocks.blocks import build_block, on_meta

SEED = 20_240_229


def at_work(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor is proved: short ones would drown a difference in their rounding."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class Blueprint:
    """A block as it was before anything was cut, without its weights; its buffers are copies.

    One that cannot be copied is built again, where there is a `builder`; otherwise the error is raised.
    """

    def __init__(self, block: nn.Module, builder: Callable[[], nn.Module] | None = None) -> None:
        metas = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in block.parameters()}
        self._builder: Callable[[], nn.Module] | None = None
        try:
            self.bare = copy.deepcopy(block, dict[int, object](metas))
        except Exception:
            self.bare = block if builder is None else on_meta(builder)
            again = {id(parameter) for parameter in self.bare.parameters()}
            if any(id(parameter) in again for parameter in block.parameters()):  # it returns what it has built before
                raise
            self._builder = builder

    def _copy(self) -> nn.Module:
        if self._builder is None:
            return copy.deepcopy(self.bare)
        return build_block(self._builder, 0, SEED)

    @property
    def short_type(self) -> torch.dtype | None:
        """The type of its weights that is proved in float32; None: there is none."""
        types = (p.dtype for p in self.bare.parameters())
        return next((dtype for dtype in types if at_work(dtype) is not dtype), None)

    def draw(self, device: torch.device, *, as_built: bool = False) -> nn.Module:
        """Return a twin in evaluation mode: no dropout, and no statistics that it would change.

        `as_built`: of the types of a run, not those in which numbers are compared.
        """
        twin = self._copy()
        generator = torch.Generator(device).manual_seed(SEED)
        drawn: dict[int, nn.Parameter] = {}
        for module in twin.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in drawn:
                        weight = _draw(name, parameter, device, generator)
                        weight = weight.to(parameter.dtype) if as_built else weight
                        drawn[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
                    module._parameters[name] = drawn[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device, buffer.dtype if as_built else at_work(buffer.dtype))
        return twin.eval()


def _draw(name: str, like: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draw a weight whose products are about as large as what they are made of."""
    drawn = torch.empty(like.shape, dtype=at_work(like.dtype), device=device)
    if not drawn.is_floating_point():
        return drawn.zero_()
    if like.dim() < 2:
        return drawn.uniform_(-0.5, 0.5, generator=generator).add_(0.0 if "bias" in name else 1.0)
    fan = max(like.shape[1:]) if like.dim() == 3 else prod(like.shape[1:])
    bound = (3 / max(fan, 1)) ** 0.5
    return drawn.uniform_(-bound, bound, generator=generator)
