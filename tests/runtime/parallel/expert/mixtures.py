"""Small mixtures of experts, whose routers prefer some experts to others: a layer, and a transformer."""

from typing import Any

import torch

from quintsched.runtime import MoE
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.models.layers import Mlp

from ...toys import CLASSES
from ..lively import livelier

DEPTH, LENGTH, HIDDEN = 2, 8, 16


def mixture(**options: Any) -> MoE:
    torch.manual_seed(0)
    shared = Mlp(6, 5, bias=False) if options.pop("shared", False) else None
    layer = MoE(6, 5, lambda: Mlp(6, 7, bias=False), shared=shared, **options).double()
    with torch.no_grad():
        layer.router.weight.mul_(4)
    return layer


def moe_blocks(length: int = LENGTH, **options: Any) -> Blocks:
    """A transformer with experts of which some are chosen more often than others."""
    settings = {"hidden": HIDDEN, "depth": DEPTH, "experts": 4, "mlp_ratio": 2, "balance": 0.05, "z": 0.01} | options
    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [livelier(block) for block in moe_gpt(data, MoEGPTOptions(**settings))]
