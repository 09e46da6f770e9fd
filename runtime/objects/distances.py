"""How far apart two runs are, tensor by tensor: whole and cut, a model and its blocks, a mesh and one process."""

from __future__ import annotations

from math import inf, isfinite

import torch
from torch import Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinite where shapes, or places that are not finite, are others."""
    if found.shape != expected.shape:
        return inf
    if not expected.numel():
        return 0.0
    a, b = _real(found), _real(expected)
    largest = float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max())
    return largest if isfinite(largest) else inf


def off(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, as a share of the largest number expected, but for `least`."""
    return distance(found, expected) / max(largest_of(expected), least, torch.finfo(torch.float32).tiny)


def largest_of(tensor: Tensor) -> float:
    """Return the largest of a tensor's finite numbers, without its sign."""
    return float(_real(tensor).nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor of any type as float64, complex numbers as two."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
