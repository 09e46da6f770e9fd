"""A small mixture of experts, whose router prefers some to others."""

from __future__ import annotations

from typing import Any

import torch

from quintsched.runtime import MoE
from quintsched.runtime.models.layers import Mlp


def mixture(**options: Any) -> MoE:
    torch.manual_seed(0)
    shared = Mlp(6, 5, bias=False) if options.pop("shared", False) else None
    layer = MoE(6, 5, lambda: Mlp(6, 7, bias=False), shared=shared, **options).double()
    with torch.no_grad():
        layer.router.weight.mul_(4)
    return layer
