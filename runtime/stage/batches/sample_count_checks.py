"""Checks of the rows of what is given: as many for each sample in all tensors of a tree, none in plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintsched.errors import MisfitError, counted

from ...blocks.trees import Tensors, Tree, flatten


def fewest_rows(trees: Sequence[Any], most: int) -> int:
    """Return the number of samples where inputs are absent: a tensor may have several rows per sample."""
    rows = (len(tensor) for tensor in flatten(list(trees))[1] if tensor.dim() and len(tensor) > 1)
    return min(rows, default=most)


def require_no_rows(name: str, given: Any, samples: int | None, sizes: Sequence[int]) -> None:
    """Raise `MisfitError` for a list of plain values, one for each sample, which would go whole to every microbatch.

    `sizes` are the samples of each microbatch.
    """
    if isinstance(given, list) and len(given) == samples and sum(map(bool, sizes)) > 1:
        if not flatten(given)[1]:
            raise MisfitError(
                f"{name} is a list of {counted(len(given), 'value')} beside as many samples: tensors are cut into "
                f"microbatches, lists are not; give a tensor, torch.tensor({name}), or, where it belongs to no sample, "
                "a tuple"
            )
    elif isinstance(given, list | tuple | Mapping):
        for part in given.values() if isinstance(given, Mapping) else given:
            require_no_rows(name, part, samples, sizes)


def require_as_many_samples(name: str, tree: Tree, tensors: Tensors) -> None:
    """Raise `MisfitError` unless the tensors of a tree have the same number of rows, one row, or no dimensions."""
    rows = {path: len(t) for path, t in zip(tree.paths, tensors, strict=True) if t.dim() and len(t) != 1}
    if len(set(rows.values())) > 1:
        named = ", ".join(f"{name}{path} has {count}" for path, count in rows.items())
        raise MisfitError(
            f"the tensors of {name} have to have as many samples, dimension 0, to be cut into microbatches: {named}"
        )
