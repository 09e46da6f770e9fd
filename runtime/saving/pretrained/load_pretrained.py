"""Pretrained weights: each rank reads from safetensors files no more than the slices that it holds.

    file    h.0.attn.c_attn.weight (D, 3D)     ░░▓░░▓░░▓    ▓: the columns that this rank reads,
    rank    1.attention.qkv.weight (3D/tp, D)  ▓▓▓          joined, transposed, and cast to the weight's type

All ranks know first what the checkpoint lacks, has beyond the model, or has in other shapes; only then is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quintsched.errors import MisfitError

from ..load_state import StateLoader
from ..placement import Placement
from ..rank_tensors import RankTensors
from ..replaced_folder import standing
from ..saved_state import MODEL, SavedState
from ..stored_tensors import alike, turned
from .conversions import in_model_names
from .gpt2 import require_gpt2
from .origins import OLD_BUFFERS, Origin, Prefix, find_prefix, join_tied, require_names
from .safetensors_folder import Folder, open_folder
from .tensor_names import ModelNames


@dataclass(frozen=True)
class LoadedWeights:
    """What a checkpoint and the model did not have in common.

    Attributes:
        fresh: weights that the checkpoint lacks, by our names: they keep their initial values.
        unused: tensors that no weight takes.
        beside: values that were asked for besides, by name; None where there is none.
    """

    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    beside: Mapping[str, object] = field(default_factory=dict)


def load_pretrained(
    path: Path, rank: RankTensors, *, given: Mapping[str, str] | None, fresh: Sequence[str], strict: bool
) -> LoadedWeights:
    """Let what this rank holds be what a checkpoint has; see `EngineSaves.load_pretrained`. All ranks call this."""
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
            saved.add(MODEL + name, next(iter(stored)), Placement.whole(shape), tensor)
    found = [name for name in folder.tensors if not OLD_BUFFERS.search(name) or name in used]
    unused = require_names(folder.path, found, used, lacking, names.may_stay(fresh), strict=strict)
    StateLoader(saved, rank, is_part=True).load(everyone.together)
    return LoadedWeights(tuple(lacking.values()), unused)


def _origins(folder: Folder, names: ModelNames, given: Mapping[str, str] | None) -> tuple[dict[str, Origin], Prefix]:
    """Return where each of the model's tensors is found, and what is to be done with these names in this folder."""
    found = folder.tensors.keys()
    try:
        origins = names.origins(given, found)
        if given is None and names.is_gpt2(found):
            require_gpt2(names.outlines, found, folder.config)
    except MisfitError as error:
        raise MisfitError(f"{folder.path}: {error}") from None
    return origins, find_prefix((origin.name for origin in origins.values()), found)
