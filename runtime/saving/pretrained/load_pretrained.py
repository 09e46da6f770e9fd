"""Pretrained weights: each rank reads from safetensors files only the slices that it holds.

    file    h.0.attn.c_attn.weight (D, 3D)     ░░▓░░▓░░▓    ▓: the columns that this rank reads,
    rank    1.attention.qkv.weight (3D/tp, D)  ▓▓▓          joined, transposed, and cast to the weight's dtype

All ranks check first for missing or extra tensors, and for other shapes; only then are tensors read.

Checkpoints whose tensors transformers converts while it loads them, such as experts that the model has as one tensor:

    experts.0.w1.weight   experts.0.w3.weight ─┐  stacked, and joined, where they are read:
    experts.1.w1.weight   experts.1.w3.weight ─┴▶ experts.gate_up_proj (experts, 2 × width, hidden)

The rules are transformers' own for the model (its `conversion_mapping`); renaming, stacking, joining and
chunking are implemented here. A folder that has the model's names already is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from quintsched.errors import MisfitError

from ..atomic_output_folder import standing
from ..index_ranges_in_full_tensors import TensorPlacement
from ..lazy_tensors import Folder, StoredTensor, alike, joined, open_folder, part_of, turned
from ..load_state import StateLoader
from ..rank_tensor_inventory import RankTensors
from ..saved_state import MODEL, SavedState
from .foreign_names import OLD_BUFFERS, Prefix, TensorOrigin, find_prefix, join_tied, require_gpt2, require_names
from .model_tensor_names import ModelNames


@dataclass(frozen=True)
class LoadedWeights:
    """Differences between a checkpoint and the model, after loading.

    Attributes:
        fresh: weights that the checkpoint lacks, by our names: they keep their initial values.
        unused: tensors of the checkpoint that no weight takes.
        beside: further values that were requested, by name; None for one that is missing.
    """

    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    beside: Mapping[str, object] = field(default_factory=dict)


def load_pretrained(
    path: Path, rank: RankTensors, *, given: Mapping[str, str] | None, fresh: Sequence[str], strict: bool
) -> LoadedWeights:
    """Load a checkpoint into this rank's tensors; see `EngineSaves.load_pretrained`. All ranks call this."""
    everyone, names = rank.everyone, rank.names
    path = standing(path, says=everyone.is_first)
    folder = everyone.together(lambda: in_model_names(open_folder(path), names))
    origins, prefix = everyone.together(lambda: _origins(folder, names, given))
    saved = SavedState(str(folder.path))
    lacking: dict[str, str] = {}
    used: set[str] = set()
    shapes = {one.name: one.placement.shape for one in rank.held()}
    for name, origin in join_tied(origins, names.same()).items():
        stored = origin.stored(folder.tensors, prefix)
        used.update(stored)
        if not stored:
            lacking[prefix.in_file(origin.name)] = name
        elif name in shapes:
            tensor = alike(stored, folder.path)
            tensor = turned(tensor) if origin.transposed else tensor
            shape = tensor.shape
            if origin.is_cut_short and shape[1:] == shapes[name][1:] and shape[0] > shapes[name][0]:
                shape = shapes[name]
            saved.add_piece(MODEL + name, next(iter(stored)), TensorPlacement.whole(shape), tensor)
    found = [name for name in folder.tensors if not OLD_BUFFERS.search(name) or name in used]
    unused = require_names(folder.path, found, used, lacking, names.may_stay(fresh), strict=strict)
    StateLoader(saved, rank, is_part=True).load_state(everyone.together)
    return LoadedWeights(tuple(lacking.values()), unused)


def _origins(
    folder: Folder, names: ModelNames, given: Mapping[str, str] | None
) -> tuple[dict[str, TensorOrigin], Prefix]:
    """Return the origin of each of the model's tensors, and the prefix that maps its names to this folder's."""
    found = folder.tensors.keys()
    try:
        origins = names.origins(given, found)
        if given is None and names.is_gpt2(found):
            require_gpt2(names.outlines, found, folder.config)
    except MisfitError as error:
        raise MisfitError(f"{folder.path}: {error}") from None
    return origins, find_prefix((origin.name for origin in origins.values()), found)


def in_model_names(folder: Folder, names: ModelNames) -> Folder:
    """Return the folder with its tensors converted to the names and shapes that the model has.

    Raises `MisfitError` for a conversion that is not implemented.
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
    groups: dict[str, tuple[Any, dict[str, list[StoredTensor]]]] = {}  # by name: converter, sources by pattern
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
