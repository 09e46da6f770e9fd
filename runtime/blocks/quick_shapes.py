"""Fast shape rules for common layers on the meta device, where torch takes some hundred Python calls for each.

linear                  (…, in) by (out, in)    ──▶ (…, out)
layer norm, GELU, sums of two of one shape      ──▶ the input's shape

Only for contiguous strided tensors of matching shapes, where no autograd graph is recorded. All other calls go to
torch, which also raises the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class QuickShapes(TorchFunctionMode):
    """Torch function mode in which common layers on the meta device return an empty tensor of the right shape."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        is_seen = torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack()  # a mode may record calls
        rule = None if is_seen else _RULES.get(func)
        with torch._C.DisableTorchFunction():
            found = None if rule is None else rule(*args, **given)
        return func(*args, **given) if found is None else found


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not _are_plain(x, weight) or x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and not (_are_plain(x, bias) and bias.shape == weight.shape[:1]):
        return None
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def _layer_norm(x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor | None:
    normed = torch.Size(shape)
    if not normed or not _are_plain(x) or x.shape[-len(normed) :] != normed:
        return None
    fits = all(one is None or (_are_plain(x, one) and one.shape == normed) for one in (weight, bias))
    return torch.empty_like(x) if fits else None


def _gelu(x: Any, approximate: str = "none") -> Tensor | None:
    return torch.empty_like(x) if _are_plain(x) and approximate in ("none", "tanh") else None


def _sum(x: Any, other: Any, *more: Any, **options: Any) -> Tensor | None:
    alike = not more and not options and _are_plain(x, other) and x.shape == other.shape
    return torch.empty_like(x) if alike else None


def _are_plain(*tensors: Any) -> bool:
    """Whether all are contiguous meta tensors of one floating-point dtype, and of no subclass."""
    first = tensors[0]
    plain = [
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_meta
        and tensor.dtype == first.dtype
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        for tensor in tensors
    ]
    return all(plain)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.gelu: _gelu,
    torch.add: _sum,
    Tensor.add: _sum,
    Tensor.__add__: _sum,
}
