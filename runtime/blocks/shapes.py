"""What travels between stages: found without data, and agreed between ranks by a hash in a tensor.

Only the first stage sees inputs, so its rank tells the others their shape: a few numbers in a tensor. Each rank then
finds all other shapes by itself on the meta device, and all compare a hash of what they found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ..comm import Group, ReduceOp
from .blocks import Blocks, Parcel, TensorSpec, trace_shapes

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.int8,
    torch.bool,
)
_MOST_DIMENSIONS = 8


def tell_spec(spec: TensorSpec | None, source: int, group: Group, device: torch.device) -> TensorSpec:
    """Return the spec that the member at index `source` of the group has; the others pass None."""
    told = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    if spec is not None:
        if len(spec.shape) > _MOST_DIMENSIONS or spec.dtype not in _DTYPES:
            raise MisfitError(f"inputs of {spec} cannot be told to other ranks")
        numbers = [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
        told[: len(numbers)] = torch.tensor(numbers, device=device)
    group.broadcast(told, source).wait()
    dtype, dimensions, *shape = told.tolist()
    return TensorSpec(tuple(shape[:dimensions]), _DTYPES[dtype])


def agree(what: str, fingerprint: str, group: Group, device: torch.device) -> None:
    """Raise `MisfitError` on every member unless all of them have the same fingerprint of `what`."""
    digest = hashlib.sha256(fingerprint.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.int64, device=device)
    low, high = mine.clone(), mine.clone()
    group.all_reduce(low, ReduceOp.MIN).wait()
    group.all_reduce(high, ReduceOp.MAX).wait()
    if not torch.equal(low, high):
        raise MisfitError(f"the ranks do not agree on {what}; this one has: {fingerprint[:400]}")


def find_shapes(
    blocks: Blocks,
    inputs: TensorSpec,
    extras: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    world: Group,
    device: torch.device,
) -> list[Parcel]:
    """Return what every block leaves for the next, for one unit; raises `MisfitError` where ranks disagree."""
    parcels = trace_shapes(blocks, inputs, {name: TensorSpec.of(tensor) for name, tensor in extras.items()}, dtype)
    agree("the shapes of what travels", " ".join(map(str, [inputs, *parcels])), world, device)
    return parcels
