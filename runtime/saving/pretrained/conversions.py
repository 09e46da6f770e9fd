"""Checkpoints under names that transformers changes while it loads them: experts that are one tensor in the model, say.

    experts.0.w1.weight   experts.0.w3.weight ─┐  stacked, and joined, where they are read:
    experts.1.w1.weight   experts.1.w3.weight ─┴▶ experts.gate_up_proj (experts, 2 × width, hidden)

The rules are transformers' own for the model (its `conversion_mapping`); renaming, stacking, joining and
chunking are known here. A folder that has the model's names already is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from quintsched.errors import MisfitError

from ..stored_tensors import StoredTensor, joined, part_of
from .origins import find_prefix
from .safetensors_folder import Folder
from .tensor_names import ModelNames


def in_model_names(folder: Folder, names: ModelNames) -> Folder:
    """Return the folder with its tensors under the names that they have in the model.

    Raises `MisfitError` for a conversion that is not known.
    """
    if names.own is None or not names.conversions:
        return folder
    wanted = list(names.own.values())
    prefix = find_prefix(wanted, folder.tensors)
    if all(prefix.in_file(name) in folder.tensors for name in wanted):
        return folder
    return replace(folder, tensors=_converted(folder, names.conversions))


def _converted(folder: Folder, transforms: Sequence[Any]) -> dict[str, StoredTensor]:
    loading = import_module("transformers.core_model_loading")
    renamings = [rule for rule in transforms if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in transforms if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, StoredTensor] = {}
    groups: dict[str, tuple[Any, dict[str, list[StoredTensor]]]] = {}  # by name: the converter, what it makes it of
    for name in sorted(folder.tensors, key=loading.dot_natural_key):
        renamed, pattern = loading.apply_converters(loading.apply_renamings(name, renamings), converters)
        if pattern is None:
            found[renamed] = folder.tensors[name]
        else:
            _, sources = groups.setdefault(renamed, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(folder.tensors[name])
    for name, (converter, sources) in groups.items():
        found.update(_carried_out(folder, name, converter, sources))
    return found


def _carried_out(
    folder: Folder, name: str, converter: Any, sources: Mapping[str, list[StoredTensor]]
) -> Mapping[str, StoredTensor]:
    """Return the tensors that a converter makes."""
    patterns, targets = converter.source_patterns, converter.target_patterns
    made = {name: [tensor for pattern in patterns for tensor in sources.get(pattern, ())]}
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            stacks = [sources[pattern] for pattern in patterns if pattern in sources]
            made = {name: [joined(stack, operation.dim, stacks=True) for stack in stacks]}
        elif kind == "Concatenate":
            made = {name: [joined(made[name], operation.dim)]}
        elif kind == "Chunk" and len(made[name]) == 1:
            whole, count = made.pop(name)[0], len(targets)
            made = {
                name.replace(targets[0], target): [part_of(whole, operation.dim, index, count)]
                for index, target in enumerate(targets)
            }
        else:
            raise MisfitError(
                f"{folder.path}: transformers makes {name!r} by {kind}, which is not known here; load the model with "
                "from_pretrained, and split it"
            )
    return {target: tensors[0] for target, tensors in made.items()}
