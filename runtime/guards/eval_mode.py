"""Models in eval mode, as `from_pretrained` returns them: one warning about layers that act otherwise in training."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def eval_mode_warning(blocks: Iterable[nn.Module]) -> str | None:
    """Return a warning if all blocks are in eval mode, and so train without dropout or batch statistics; else None."""
    modules = [module for block in blocks for module in block.modules()]
    if not modules or any(module.training for module in modules):
        return None
    found = [f"{type(m).__name__}, {name}={rate:g}" for m in modules for name, rate in _drop_rates(m)][:1]
    norms = (m for m in modules if isinstance(m, _NormBase) and m.running_mean is not None)
    found += [f"running statistics of {type(m).__name__}" for m in norms][:1]
    if not found:
        return None
    return (
        "the model is in eval mode, as from_pretrained gives it, and trains so: without dropout, its batch norms with "
        f"the statistics that they have ({'; '.join(found)}); call model.train() before it is split to train with them"
    )


def _drop_rates(module: nn.Module) -> Iterable[tuple[str, float]]:
    """Yield the dropout rates of a module: a dropout's `p`, and attributes named so (`attention_dropout`)."""
    for name, value in vars(module).items():
        is_rate = "drop" in name or (name == "p" and "drop" in type(module).__name__.lower())
        if is_rate and isinstance(value, float) and 0 < value <= 1:
            yield name, value
