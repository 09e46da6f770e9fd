"""What travels between stages: found without data, and agreed between ranks by a hash in a tensor.

Only the first stage sees inputs, so its rank tells the others their shape: text in a tensor. Each rank then finds all
other shapes by itself on the meta device, and all compare a hash of what they found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..comm import Group, ReduceOp
from ..comm.control import first_said
from .blocks import TARGETS, Blocks, Parcel, accepted_extras, on_meta, split_result, typed
from .dtensor import before_fully_shard
from .tree_words import from_words, to_words
from .trees import TensorSpec, TreeSpec, tensors_of


def announce_spec(spec: TreeSpec | None, source: int, group: Group, device: torch.device) -> TreeSpec:
    """Return the spec that the member at index `source` of the group has; the others pass None.

    Raises `MisfitError` on all of them for one that cannot be written down (see `tree_words.to_words`).
    """
    words = b""
    if spec is not None:
        try:
            words = b"+" + to_words(spec).encode()
        except MisfitError as error:
            words = b"-" + str(error).encode()
    length = torch.tensor([len(words)], dtype=torch.int64, device=device)
    group.broadcast(length, source).wait()
    sent = torch.tensor(list(words) or [0] * int(length), dtype=torch.uint8, device=device)
    group.broadcast(sent, source).wait()
    verdict, text = chr(sent[0]), bytes(sent[1:].tolist()).decode()
    if verdict == "-":
        raise MisfitError(text)
    return from_words(text)


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
    inputs: TreeSpec,
    extras: Mapping[str, TreeSpec],
    dtype: torch.dtype | None,
    world: Group,
    device: torch.device,
) -> list[Parcel]:
    """Return what every block leaves for the next, for one unit.

    Raises `MisfitError` on all ranks, where they disagree, or some cannot find shapes.
    """
    given = " ".join([str(inputs), *(f"{name}: {extras[name]}" for name in sorted(extras))])
    agree("the inputs and extras of a step", given, world, device)
    parcels, problem = list[Parcel](), ""
    try:
        parcels = trace_shapes(blocks, inputs, extras, dtype)
    except MisfitError as error:
        problem, cause = str(error), error.__cause__
    said = first_said(problem, world)
    if said:
        raise MisfitError(said) from (cause if problem else None)
    agree("the shapes of what travels", " ".join(map(str, parcels)), world, device)
    return parcels


def trace_shapes(
    blocks: Blocks,
    inputs: TreeSpec,
    extras: Mapping[str, TreeSpec],
    dtype: torch.dtype | None = None,
    results: Sequence[object] = (),
) -> list[Parcel]:
    """Return what every block leaves for the next, for one microbatch, found on the meta device: no data, no memory.

    `dtype` is that of the weights; None leaves them as they are built. `results`, where there are any, are what blocks
    have given when they ran, on the meta device. Raises `MisfitError` that names the block that cannot take what the
    one before gives.
    """
    given = inputs.empty("meta")
    beside = {name: spec.empty("meta") for name, spec in extras.items()}
    left: list[tuple[TreeSpec, bool]] = []
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
            result = results[number] if results else _call_on_meta(module, given, taken, dtype)
        except Exception as error:
            raise MisfitError(
                f"block {number} cannot take {TreeSpec.of(given)}: {error} (in its {type(module).__name__}; shapes are "
                "found by running the blocks on torch's meta device)"
            ) from error
        given, fresh, auxiliary = split_result(result)
        left.append((_spec_of_output(number, module, given), auxiliary is not None))
        for name, tensor in fresh.items():
            if name in beside or name in riders or name == TARGETS:
                raise MisfitError(f"block {number} sends {name!r} along, but there is something else of that name")
            _require_tensor(number, module, tensor, f"sends {name!r} along, {{}}; only tensors ride along")
            riders[name] = _Ride(tensor, number, number)
    for name, ride in riders.items():
        if ride.until == ride.since:
            raise MisfitError(f"block {ride.since} sends {name!r} along, and no later block takes it")
    return [
        Parcel(
            output,
            tuple((name, TensorSpec.of(r.tensor)) for name, r in riders.items() if r.since <= number < r.until),
            has_loss,
        )
        for number, (output, has_loss) in enumerate(left)
    ]


def wants_data(error: MisfitError) -> bool:
    """Whether shapes could not be found since a block looks at data (`.item()`, masks), or is not made for meta."""
    cause = error.__cause__
    return isinstance(cause, NotImplementedError) or (cause is not None and "meta" in str(cause).lower())


def _spec_of_output(number: int, block: nn.Module, output: object) -> TreeSpec:
    """Return the spec of what a block gave; raises `MisfitError` where it has no tensors, or such as cannot travel."""
    spec = TreeSpec.of(output)
    if not spec.tensors:
        raise MisfitError(
            f"block {number} ({type(block).__name__}) returns {spec.tree}, in which there is no tensor; it must return "
            "a tensor, or tuples, lists, dicts or dataclasses of tensors, or one of these beside an auxiliary loss"
        )
    for path, tensor in zip(spec.tree.paths, tensors_of(output), strict=True):
        _require_tensor(number, block, tensor, f"returns {{}}{f' at {path}' if path else ''}, which cannot travel")
    return spec


def _require_tensor(number: int, block: nn.Module, found: object, words: str) -> None:
    """Raise `MisfitError` unless something is a dense tensor of torch's own."""
    if isinstance(found, Tensor) and not isinstance(found, DTensor):
        if found.layout is torch.strided and not found.is_quantized and not found.is_nested:
            return
        kind = f"a tensor of layout {found.layout}"
    else:
        kind = f"a {type(found).__name__}"
    raise MisfitError(f"block {number} ({type(block).__name__}) {words.format(kind)}")


@dataclass
class _Ride:
    """A tensor that rides along from block `since` to block `until`."""

    tensor: Tensor
    since: int
    until: int


def _call_on_meta(module: nn.Module, given: object, extras: dict[str, Any], dtype: torch.dtype | None) -> Any:
    module = before_fully_shard(module)
    weights = {name: tensor.to("meta", kind) for name, tensor, kind in typed(module, dtype)}
    with torch.no_grad():
        return torch.func.functional_call(module, weights, (given,), extras, tie_weights=False)
