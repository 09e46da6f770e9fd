"""Model of `killed_run.yaml`: a Vision Transformer, one rank of which may be killed as a machine fails.

KILLED=2:150      kill -9 of rank 2 in the 150th forward of its first block (eight microbatches are a step)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from torch import nn

from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.vit import ViTOptions, vit


def build(data: DataSpec) -> list[Callable[[], nn.Module]]:
    """Return the blocks, the same on all ranks."""
    blocks = vit(data, ViTOptions(hidden=64, depth=8, heads=4))
    if "KILLED" not in os.environ:
        return blocks
    doomed_rank, _, number = os.environ["KILLED"].partition(":")
    forwards = [0]

    def kill(module: nn.Module, given: object) -> None:
        forwards[0] += module.training
        if forwards[0] == int(number) and os.environ.get("RANK", "0") == doomed_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def doomed(block: Callable[[], nn.Module]) -> nn.Module:
        module = block()
        module.register_forward_pre_hook(kill)
        return module

    half = len(blocks) // 2
    return [*blocks[:half], lambda: doomed(blocks[half]), *blocks[half + 1 :]]
