"""How evenly the experts are loaded: how often each was chosen, over all tokens of all ranks.

model               tokens per expert        imbalance: that of the most loaded one / the mean
"2.mlp"             130  126   90  166       1.30
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from ...blocks.blocks import Blocks, named_modules
from ...comm import Group
from .moe import MoE, mixtures


class ExpertLoad:
    """Adds up, over all ranks, how often experts were chosen in training.

    Args:
        blocks: the whole model, which says what other ranks count.
        stages: this rank's stages; names of blocks begin with "blocks.".
        tensor: the ranks of tp, which all see the same tokens.
        world: all ranks.
    """

    def __init__(self, blocks: Blocks, stages: Mapping[int, nn.Module], tensor: Group, world: Group) -> None:
        self._blocks, self._stages, self._tensor, self._world = blocks, stages, tensor, world

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The experts of every mixture in the model."""
        return {name: m.num_experts for name, m in named_modules(self._blocks) if isinstance(m, MoE)}

    def read(self) -> dict[str, Tensor]:
        """Return the counts of each mixture since the last reading, (experts,), int64 (collective)."""
        if not self._sizes:
            return {}
        counts = torch.zeros(len(self._sizes), max(self._sizes.values()), dtype=torch.int64, device=self._world.device)
        rows = dict(zip(self._sizes, counts, strict=True))
        for stage in self._stages.values():
            for name, mixture in mixtures(stage).items():
                if self._tensor.index == 0:
                    rows[name.removeprefix("blocks.")][: mixture.num_experts] += mixture.expert_tokens
                mixture.expert_tokens.zero_()
        self._world.all_reduce(counts).wait()
        return {name: rows[name][:size] for name, size in self._sizes.items()}


def expert_figures(tokens: Mapping[str, Tensor]) -> dict[str, object]:
    """Return what a log says of the experts: tokens of each, and the greatest imbalance; nothing without experts."""
    if not tokens:
        return {}
    counts = {name: [int(count) for count in row.tolist()] for name, row in tokens.items()}
    imbalance = max(max(row) * len(row) / max(sum(row), 1) for row in counts.values())
    return {"expert_tokens": counts, "expert_imbalance": imbalance}
