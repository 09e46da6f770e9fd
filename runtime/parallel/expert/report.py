"""What expert parallelism shares out of a model, in a line: experts that are not of our `MoE` are on all ranks of ep.

These are replicas then, as over dp: each rank's samples pass all experts, and the gradients of all ranks are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from .moe import MoE, mixtures

_NAMES = ("expert", "moe")


def expert_report(outlines: Sequence[nn.Module], size: int) -> str:
    """Return which mixtures of experts of a model are shared out over `size` ranks, and which are copied on all."""
    shared = [
        f"{number}.{name}" if name else str(number) for number, block in enumerate(outlines) for name in mixtures(block)
    ]
    copied = [f"{number}.{name}" for number, block in enumerate(outlines) for name in _foreign(block)]
    words = f"shares out the experts of {_listed(shared)}" if shared else "shares out no experts"
    others = (
        f"; on all ranks alike, as over dp: {_listed(copied)} (quintsched.runtime.MoE is shared out)" if copied else ""
    )
    return f"ep={size} {words}{others}"


def _foreign(block: nn.Module) -> Iterator[str]:
    """Yield the names of what looks like experts, and is none of ours."""
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
