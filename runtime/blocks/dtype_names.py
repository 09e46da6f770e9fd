"""Names of dtypes in safetensors files, the conversions that are allowed when weights are loaded, and numbers to try.

whole numbers     int8 … uint64, bool        a float32 weight is loaded from bfloat16 or float8,
real numbers      float8 … float64           but not from int8: that is quantized, and stands for other numbers,
complex numbers   complex64                  nor from complex64, whose imaginary part would be lost
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their safetensors names: all that PyTorch shares with it, except sub-byte types."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}


def name_of(dtype: torch.dtype, of: str) -> str:
    """Return the safetensors name of a dtype; raises `UsageError` for others. `of` names the tensor in the message."""
    if dtype not in _NAMES:
        raise UsageError(f"{of} is {dtype}, which a checkpoint cannot hold, except in a job's checkpoint.format: dcp")
    return _NAMES[dtype]


def type_of(name: str, of: str) -> torch.dtype:
    """Return the dtype of a safetensors name; raises `InputError` for others. `of` names the tensor in the message."""
    if name not in TYPES:
        raise InputError(f"{of} has numbers of type {name!r}, which cannot be read; save it in another type")
    return TYPES[name]


def is_low(dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has too little precision to accumulate in (less than 4 bytes)."""
    return dtype.is_floating_point and dtype.itemsize < 4


def require_kind(where: str, name: str, found: torch.dtype, weight: str, wanted: torch.dtype) -> None:
    """Raise `MisfitError` if stored numbers are of another kind (whole, real, complex) than the weight they fill."""
    if _kind(found) != _kind(wanted):
        raise MisfitError(f"{where}: {name!r} has numbers of {found}, {weight} of {wanted}")


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "real" if dtype.is_floating_point else "whole"


def some_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor of small distinct numbers (repeating every 13), or of zeros for integer types."""
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    return (torch.arange(tensor.numel(), device=tensor.device) % 13 - 6).div(7).to(tensor.dtype).view(tensor.shape)
