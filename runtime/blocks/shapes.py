"""What travels between stages: found without data, and agreed between ranks by a hash in a tensor.

Only the first stage sees inputs, so its rank tells the others their shape: a few numbers in a tensor. Each rank then
finds all other shapes by itself on the meta device, and all compare a hash of what they found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..comm import Group, ReduceOp
from .blocks import (
    TARGETS,
    BlockResult,
    Blocks,
    Carry,
    Parcel,
    TensorSpec,
    accepted_extras,
    on_meta,
    split_result,
)
from .dtensor import before_fully_shard

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


def announce_spec(spec: TensorSpec | None, source: int, group: Group, device: torch.device) -> TensorSpec:
    """Return the spec that the member at index `source` of the group has; the others pass None."""
    announced = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    if spec is not None:
        if len(spec.shape) > _MOST_DIMENSIONS or spec.dtype not in _DTYPES:
            raise MisfitError(f"inputs of {spec} cannot be announced to other ranks")
        numbers = [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
        announced[: len(numbers)] = torch.tensor(numbers, device=device)
    group.broadcast(announced, source).wait()
    dtype, dimensions, *shape = announced.tolist()
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
    extras: Mapping[str, TensorSpec],
    dtype: torch.dtype | None,
    world: Group,
    device: torch.device,
) -> list[Parcel]:
    """Return what every block leaves for the next, for one unit; raises `MisfitError` where ranks disagree."""
    parcels = trace_shapes(blocks, inputs, extras, dtype)
    agree("the shapes of what travels", " ".join(map(str, [inputs, *parcels])), world, device)
    return parcels


def trace_shapes(
    blocks: Blocks, inputs: TensorSpec, extras: Mapping[str, TensorSpec], dtype: torch.dtype | None = None
) -> list[Parcel]:
    """Return what every block leaves for the next, for one microbatch, found on the meta device: no data, no memory.

    `dtype` is that of the weights; None leaves them as they are built.
    Raises `MisfitError` that names the block that cannot take what the one before gives.
    """
    given = inputs.empty("meta")
    beside = {name: spec.empty("meta") for name, spec in extras.items()}
    left: list[tuple[Tensor, bool]] = []
    riders: dict[str, _Ride] = {}
    for number, block in enumerate(blocks):
        module = on_meta(block)
        accepts = accepted_extras(module)
        taken = {name: extra for name, extra in beside.items() if accepts(name)}
        for name, ride in riders.items():
            if accepts(name):
                ride.until = number
                taken[name] = ride.tensor
        try:
            result = _call_on_meta(module, given, taken, dtype)
        except Exception as error:
            raise MisfitError(
                f"block {number} cannot take {TensorSpec.of(given)}: {error} (shapes are found by running the "
                "blocks on torch's meta device)"
            ) from error
        _require_result(number, result)
        given, fresh, auxiliary = split_result(result)
        left.append((given, auxiliary is not None))
        for name, tensor in fresh.items():
            if name in beside or name in riders or name == TARGETS:
                raise MisfitError(f"block {number} sends {name!r} along, but there is something else of that name")
            riders[name] = _Ride(tensor, number, number)
    for name, ride in riders.items():
        if ride.until == ride.since:
            raise MisfitError(f"block {ride.since} sends {name!r} along, and no later block takes it")
    return [
        Parcel(
            TensorSpec.of(output),
            tuple((name, TensorSpec.of(r.tensor)) for name, r in riders.items() if r.since <= number < r.until),
            has_loss,
        )
        for number, (output, has_loss) in enumerate(left)
    ]


def _require_result(number: int, result: object) -> None:
    """Raise `MisfitError` unless a block gave a tensor, or (output, auxiliary loss), with or without riders."""
    output, auxiliary = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    found = output.output if isinstance(output, Carry) else output
    if not isinstance(found, Tensor) or isinstance(found, DTensor):
        raise MisfitError(
            f"block {number} returns a {type(found).__name__}; it must return a tensor or a Carry, or one of them "
            "beside an auxiliary loss"
        )
    if auxiliary is not None and not (isinstance(auxiliary, Tensor) and auxiliary.dim() == 0):
        shape = f"of shape {tuple(auxiliary.shape)}" if isinstance(auxiliary, Tensor) else type(auxiliary).__name__
        raise MisfitError(
            f"block {number} returns something {shape} beside its output; only an auxiliary loss may be "
            "there, a tensor of no dimensions"
        )


@dataclass
class _Ride:
    """A tensor that rides along from block `since` to block `until`."""

    tensor: Tensor
    since: int
    until: int


def _call_on_meta(
    module: nn.Module, given: Tensor, extras: dict[str, Tensor], dtype: torch.dtype | None
) -> BlockResult:
    module = before_fully_shard(module)
    weights = {  # by one name each: what torch finds under two it does not put back
        f"{path}.{name}" if path else name: t.to("meta", dtype if t.is_floating_point() else None)
        for path, inner in module.named_modules()
        for name, t in (*inner._parameters.items(), *inner._buffers.items())
        if t is not None
    }
    with torch.no_grad():
        result: BlockResult = torch.func.functional_call(module, weights, (given,), extras, tie_weights=False)
    return result
