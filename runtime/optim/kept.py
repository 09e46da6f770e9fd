"""What an optimizer keeps for one parameter, as tensors by names of one part each, and back, exactly.

    {"exp_avg": tensor, "step": 3, "a.b": tensor, "history": [tensor, tensor]}
     ──▶  "exp_avg"  "step#"  "a%2Eb"  "history#"  "history#0"  "history#1"

Tensors keep their names, so that those of the weight's shape can be cut as it is, those in lists among them; what ends
in "#" is the JSON of a value (`blocks.plain_values`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import UsageError

from ..blocks.plain_values import TEXT, NotPlainError, is_text, pack, quoted, unpack, unquoted

SCALARS = (bool, int, float, str, type(None))


def flat_of(kept: Mapping[Any, Any], of: str) -> dict[str, Tensor]:
    """Return tensors for what is kept for a parameter; `of` says in words for which.

    Raises `UsageError` for what no file of tensors can hold.
    """
    found: dict[str, Tensor] = {}
    odd: dict[Any, Any] = {}
    try:
        if not isinstance(kept, Mapping):
            raise NotPlainError(f"it is a {type(kept).__name__}, and no dict")
        for key, value in kept.items():
            if type(key) is not str:
                odd[key] = value
            elif type(value) in (Tensor, nn.Parameter, DTensor):
                found[quoted(key)] = value
            else:
                found |= pack(quoted(key), value)
        return {**found, **(pack("", odd) if odd else {})}
    except NotPlainError as error:
        raise UsageError(
            f"what the optimizer keeps for {of} cannot be saved exactly: {error}; it may keep tensors, numbers, "
            "strings, and lists and dicts of these"
        ) from None


def kept_of(flat: Mapping[str, Any], device: torch.device) -> dict[Any, Any]:
    """Return what `flat_of` made tensors of; `device` is that of the parameter. Values that are no tensors stay."""
    kept: dict[Any, Any] = {}
    for name, value in flat.items():
        if is_text(name):
            found = unpack(name.removesuffix(TEXT), flat, device)
            kept |= found if name == TEXT else {unquoted(name.removesuffix(TEXT)): found}
        elif TEXT not in name:
            kept[unquoted(name)] = value
    return kept
