"""Per-parameter optimizer state as a flat mapping from names to tensors, and back, exactly.

    {"exp_avg": tensor, "step": 3, "a.b": tensor, "history": [tensor, tensor]}
     ──▶  "exp_avg"  "step#"  "a%2Eb"  "history#"  "history#0"  "history#1"

Tensors keep their names, so that those of the weight's shape can be sharded as it is, also in lists; a name that ends
in "#" is the JSON of a value (`blocks.plain_values_as_tensors`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import UsageError

from ..blocks.dtensor import local_of
from ..blocks.plain_values_as_tensors import TEXT, NotPlainError, is_text, pack, quoted, unpack, unquoted

SCALARS = (bool, int, float, str, type(None))


def flat_of(kept: Mapping[Any, Any], of: str) -> dict[str, Tensor]:
    """Return the state of a parameter as tensors; `of` names the parameter in words.

    Raises `UsageError` for values that no file of tensors can hold.
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
    """Return the state from which `flat_of` made tensors; `device` is the parameter's. Other values stay unchanged."""
    kept: dict[Any, Any] = {}
    for name, value in flat.items():
        if is_text(name):
            found = unpack(name.removesuffix(TEXT), flat, device)
            kept |= found if name == TEXT else {unquoted(name.removesuffix(TEXT)): found}
        elif TEXT not in name:
            kept[unquoted(name)] = value
    return kept


class KeptMemory:
    """Memory of a parameter's state tensors, reused for tensors that are loaded in their place.

    Freeing and allocating them one by one would fragment the host's heap. A tensor that shares its memory with another,
    or with the parameter, is not reused.
    """

    def __init__(self, kept: dict[Any, Any], parameter: Tensor) -> None:
        named = {key: value for key, value in kept.items() if type(key) is str and type(value) is Tensor}
        starts = Counter(_start(tensor) for tensor in (local_of(parameter), *named.values()))
        self._free = {
            quoted(key): tensor
            for key, tensor in named.items()
            if tensor.dim() and tensor.is_contiguous() and starts[_start(tensor)] == 1
        }
        kept.clear()

    def take_tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the tensor that `flat_of` names so: the kept one if it matches, or a new one."""
        found = self._free.pop(name, None)
        if found is not None and (tuple(found.shape), found.dtype, found.device) == (tuple(shape), dtype, device):
            return found.detach()
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
