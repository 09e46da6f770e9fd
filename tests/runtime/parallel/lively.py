"""Transformers whose attention has something to say, and mixtures whose routers prefer some experts to others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quintsched.runtime import MoE
from quintsched.runtime.blocks.block_builders import BlockOrBuilder, Blocks
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, moe_gpt
from quintsched.runtime.models.layers import Mlp

from ..toys import CLASSES

DEPTH, LENGTH = 4, 16
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "heads": 8, "kv_heads": 4}


def livelier(build: BlockOrBuilder) -> Callable[[], nn.Module]:
    """Build a block with weights that are further from zero, and from each other."""

    def built() -> nn.Module:
        module = build()
        with torch.no_grad():
            for parameter in (p for p in module.parameters() if not p.is_meta):
                parameter.add_(torch.randn_like(parameter) / 4)
        return module

    return built


def lively_gpt(length: int = LENGTH, **options: Any) -> Blocks:
    """A transformer whose attention has something to say: at their first values all scores are nearly alike."""
    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [livelier(block) for block in gpt(data, GPTOptions(hidden=16, depth=DEPTH, **options))]


def mixture(**options: Any) -> MoE:
    torch.manual_seed(0)
    shared = Mlp(6, 5, bias=False) if options.pop("shared", False) else None
    layer = MoE(6, 5, lambda: Mlp(6, 7, bias=False), shared=shared, **options).double()
    with torch.no_grad():
        layer.router.weight.mul_(4)
    return layer


def moe_blocks(length: int = 8, **options: Any) -> Blocks:
    """A transformer with experts of which some are chosen more often than others."""
    settings = {"hidden": 16, "depth": 2, "experts": 4, "mlp_ratio": 2, "balance": 0.05, "z": 0.01} | options
    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [livelier(block) for block in moe_gpt(data, MoEGPTOptions(**settings))]
