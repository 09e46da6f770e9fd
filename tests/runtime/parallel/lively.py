"""Transformers whose attention has something to say, for tests that compare them cut with whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quintsched.runtime.blocks.block_builders import BlockOrBuilder, Blocks
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt

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
