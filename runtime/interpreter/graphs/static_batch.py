"""The batch of a captured step: what tells it from others of another shape, and memory of its own for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...blocks.trees import flatten
from ...stage.batches.microbatches import Batch


def taken_apart(batch: Batch) -> tuple[Hashable | None, list[Tensor]]:
    """Return what tells batches of different shapes apart, and the tensors of one; None where nobody can tell."""
    trees, tensors = [batch.input_tree], [tensor for unit in batch.inputs for tensor in unit]
    for given in (*batch.targets, *(extras[name] for extras in batch.extras for name in sorted(extras))):
        tree, found = flatten(given)
        trees.append(tree)
        tensors.extend(found)
    if any(tree.unknown() is not None for tree in trees):
        return None, tensors
    names = tuple(tuple(sorted(extras)) for extras in batch.extras)
    specs = tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors])
    return (tuple(trees), names, specs, batch.microbatches), tensors


def copied(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """Return a batch in memory of its own, and its tensors, in the order of `taken_apart`."""
    copies: list[Tensor] = []

    def copy(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        made = tuple([tensor.detach().clone() for tensor in tensors])
        copies.extend(made)
        return made

    def copy_tree(given: Any) -> Any:
        tree, tensors = flatten(given)
        return tree.build(copy(tensors))

    def copy_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
        return {name: copy_tree(extras[name]) for name in sorted(extras)}

    inputs = [copy(unit) for unit in batch.inputs]
    targets = [copy_tree(given) for given in batch.targets]
    extras = [copy_extras(given) for given in batch.extras]
    return Batch(inputs, targets, extras, batch.microbatches, batch.input_tree, batch.num_samples), copies
