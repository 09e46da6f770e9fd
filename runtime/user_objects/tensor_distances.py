"""Distances between tensors of two runs: split and whole model, blocks and model, mesh and one process."""

from __future__ import annotations

from math import inf, isfinite

import torch
from torch import Tensor


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinite where shapes differ, or inf and nan are at other positions."""
    if found.shape != expected.shape:
        return inf
    if not expected.numel():
        return 0.0
    a, b = _real(found), _real(expected)
    largest = float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max())
    return largest if isfinite(largest) else inf


def off(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest expected number (at least `least`)."""
    return distance(found, expected) / max(largest_of(expected), least, torch.finfo(torch.float32).tiny)


def largest_of(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor's finite numbers."""
    return float(_real(tensor).nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor of any dtype as float64, complex numbers as pairs."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
