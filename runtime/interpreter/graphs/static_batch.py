"""The batch of a captured step: what tells it from others of another shape, and memory of its own for it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor

from ...blocks.trees import Tensors, Tree, flatten
from ...stage.batches.microbatches import Batch


def taken_apart(batch: Batch) -> tuple[Hashable | None, Tensors]:
    """Return what tells batches of different shapes apart, and the tensors of one; None where nobody can tell."""
    tree, tensors = _taken_apart(batch)
    if tree.unknown() is not None or batch.input_tree.unknown() is not None:
        return None, tensors
    specs = tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors])
    return (tree, batch.input_tree, specs, batch.microbatches), tensors


def copy_of(batch: Batch) -> Batch:
    """Return a batch in memory of its own."""
    tree, tensors = _taken_apart(batch)
    copies: list[Tensor] = [tensor.detach().clone() for tensor in tensors]
    inputs, targets, extras = tree.build(copies)
    return replace(batch, inputs=inputs, targets=targets, extras=extras)


def _taken_apart(batch: Batch) -> tuple[Tree, Tensors]:
    extras = [dict(sorted(of_unit.items())) for of_unit in batch.extras]
    return flatten((list(map(tuple, batch.inputs)), list(batch.targets), extras))
