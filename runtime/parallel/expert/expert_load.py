"""Expert load: number of assignments to each expert, over all tokens of all ranks.

model               tokens per expert        imbalance: maximum / mean
"2.mlp"             130  126   90  166       1.30

`expert_report` lists the layers that expert parallelism shards. Experts of other classes than our `MoE` are replicated
over ep, as over dp: each rank's samples pass all experts, and the gradients of all ranks are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ...blocks.block_builders import Blocks, named_modules
from ...comm import Group
from .moe import MoE, mixtures


class ExpertLoad:
    """Counter of expert assignments in training forwards, summed over all ranks.

    Args:
        blocks: the whole model, for the mixtures on other ranks.
        stages: this rank's stages; names of their blocks begin with "blocks.".
        tensor: the ranks of tp, which all see the same tokens.
        world: all ranks.
    """

    def __init__(self, blocks: Blocks, stages: Mapping[int, nn.Module], tensor: Group, world: Group) -> None:
        self._blocks, self._stages, self._tensor, self._world = blocks, stages, tensor, world

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Number of experts of every mixture in the model, by name."""
        return {name: m.num_experts for name, m in named_modules(self._blocks) if isinstance(m, MoE)}

    def read_counts(self) -> dict[str, Tensor]:
        """Return the counts of each mixture since the last call, (experts,), int64, and reset them (collective)."""
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
    """Return the logged metrics of experts: tokens of each, and the greatest imbalance; empty without experts."""
    if not tokens:
        return {}
    counts = {name: [int(count) for count in row.tolist()] for name, row in tokens.items()}
    return {
        "expert_tokens": counts,
        "expert_imbalance": max(max(row) * len(row) / max(sum(row), 1) for row in counts.values()),
    }


_NAMES = ("expert", "moe")


def expert_report(outlines: Sequence[nn.Module], size: int) -> str:
    """Return a line for the log: mixtures sharded over `size` ranks, and experts replicated on all of them."""
    shared = [
        f"{number}.{name}" if name else str(number) for number, block in enumerate(outlines) for name in mixtures(block)
    ]
    copied = [f"{number}.{name}" for number, block in enumerate(outlines) for name in replicated_experts(block)]
    words = f"shares out the experts of {_listed(shared)}" if shared else "shares out no experts"
    others = (
        f"; on all ranks alike, as over dp: {_listed(copied)} (quintsched.runtime.MoE is shared out)" if copied else ""
    )
    return f"ep={size} {words}{others}"


def replicated_experts(block: nn.Module) -> Iterator[str]:
    """Yield the names of modules that look like experts, and are not part of our `MoE`: all ranks of ep have them."""
    ours = {id(inner) for layer in mixtures(block).values() for inner in layer.modules()}
    for name, module in block.named_modules():
        if id(module) in ours or isinstance(module, MoE) or not name:
            continue
        if _is_list_of_experts(name, module) or _has_fused_experts(name, module):
            yield name


def _is_list_of_experts(name: str, module: nn.Module) -> bool:
    children = list(module.children())
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and len({type(child) for child in children}) == 1
    return is_list and len(children) > 1 and _says_so(name.rpartition(".")[2])


def _has_fused_experts(name: str, module: nn.Module) -> bool:
    fused = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return fused and (_says_so(name) or _says_so(type(module).__name__))


def _says_so(name: str) -> bool:
    return any(word in name.lower() for word in _NAMES)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
