"""The state of a training in PyTorch's distributed format, which any mesh reads, and plain PyTorch as well.

    model.<name>                            masters where there are any, and buffers, under the model's own names
    optimizer.state.<name>.<key>            what the optimizer keeps for a weight
    optimizer.param_groups.<name>.<key>     the settings of its group
    engine.optimizer.…, engine.module.…     what optimizers and modules keep beside (`state.state_dict`)
    engine.step                             steps that were made

That is what `get_state_dict` of `torch.distributed.checkpoint.state_dict` gives with `flatten_optimizer_state_dict`.
Each rank writes the boxes that it holds, of copies the first. A rank that reads takes what its own boxes have in common
with those in the files, so that a checkpoint of one mesh, or of FSDP, fits any other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from quintsched.errors import MisfitError
from quintsched.files.atomic import writing

from ..blocks.plain_values import is_text, quoted
from ..optim.kept import SCALARS, flat_of
from ..state.state_dict import require_alike
from ..state.training_state import KeptState
from .dcp_files import DcpReader, DcpWriter, Entry, chunk_of, file_name, read_table, write_table
from .load_state import StateLoader
from .placement import Placement
from .pretrained.load_pretrained import LoadedWeights
from .pretrained.origins import find_prefix, require_names
from .rank_tensors import HeldTensor, RankTensors, sizes_of, state_placement
from .replaced_folder import replace_folder, standing
from .saved_state import MODEL, STEP, SavedState
from .saved_state import STATE as OURS

STATE, GROUPS = "optimizer.state.", "optimizer.param_groups."
FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata")

UNSAVED = ("params", "param_names")
"""What of an optimizer's groups names parameters, and is no setting."""


def save_dcp(path: Path, rank: RankTensors, beside: Mapping[str, object]) -> None:
    """Write the folder; see `EngineSaves.save_dcp`. All ranks call this; `beside` are values of this rank's own."""
    everyone, number = rank.everyone, rank.number
    kept_beside = everyone.together(rank.training.beside.read)
    require_alike(kept_beside, rank.groups.world)
    everyone.together(lambda: _require_places(rank))
    values = {**({STEP: torch.tensor(rank.steps.total)} if number == 0 else {}), **kept_beside, **beside}

    def write(folder: Path) -> None:
        entries = everyone.together(lambda: _write_file(folder / file_name(number), rank, values))
        mine = json.dumps(entries).encode()
        shared = [Entry(*fields) for theirs in everyone.share_bytes(mine) for fields in json.loads(theirs)]
        everyone.together(lambda: write_table(folder, shared) if number == 0 else None)

    replace_folder(path, "the checkpoint", everyone, FILES, write)


def _first_held(rank: RankTensors) -> list[HeldTensor]:
    """Return this rank's tensors, each once; of copies, the first one speaks."""
    held, further = rank.held(), {name for group in rank.names.same() for name in group[1:]}
    firsts = {id(one.tensor): one for one in reversed(held)}
    firsts |= {id(one.tensor): one for one in reversed(held) if one.name not in further}
    return [
        replace(one, speaks=one.speaks and one.name not in further and rank.is_first_twin(one))
        for one in firsts.values()
    ]


def _require_places(rank: RankTensors) -> None:
    """Raise `MisfitError` for state of which nobody can say where it lies in the whole."""
    sizes = sizes_of(rank.tensors())
    for name, placement in rank.placements(sizes)[1].items():
        if not is_text(name):
            raise MisfitError(
                f"{name!r} is {sizes[name]}, its weight here {placement.held}: a shard of such a state has no place in "
                "a whole one; save with checkpoint.format: native"
            )


def _write_file(path: Path, rank: RankTensors, values: Mapping[str, object]) -> list[Entry]:
    names = rank.names.dcp_names()
    with writing(path, "the checkpoint"), path.open("wb") as file:
        writer = DcpWriter(file, path.name)
        for one in _first_held(rank):
            if not one.speaks:
                continue
            writer.write_boxes([MODEL + name for name in names[one.name]], one.boxes(), one.placement.shape)
            kept = rank.kept(one)
            if kept is not None and (kept.is_shard or rank.groups.tensor.index == 0):
                _write_kept(writer, names[one.name], one, kept)
        for name, value in values.items():
            writer.write_value([name], value)
        file.flush()
        os.fsync(file.fileno())
    return writer.entries


def _write_kept(writer: DcpWriter, names: Sequence[str], one: HeldTensor, kept: KeptState) -> None:
    """Write what an optimizer keeps for a weight; a number or a string as it is, which PyTorch takes back so."""
    placement = state_placement(one, kept)
    plain = {quoted(key): value for key, value in kept.state.items() if type(key) is str and type(value) in SCALARS}
    others = {key: value for key, value in kept.state.items() if type(key) is not str or type(value) not in SCALARS}
    for key, value in {**plain, **flat_of(others, one.name)}.items():
        called = [f"{STATE}{name}.{key}" for name in names]
        if isinstance(value, Tensor) and tuple(value.shape) == placement.held and not is_text(key):
            writer.write_boxes(called, placement.boxes(value), placement.shape)
        else:
            writer.write_value(called, value)
    for key, value in kept.group.items():
        if key not in UNSAVED:
            writer.write_value([f"{GROUPS}{name}.{key}" for name in names], value)


def load_dcp(
    path: Path, rank: RankTensors, *, fresh: Sequence[str], strict: bool, optimizer: bool, beside: Sequence[str] = ()
) -> LoadedWeights:
    """Let what this rank holds be what a checkpoint has; see `EngineSaves.load_dcp`. All ranks call this."""
    everyone = rank.everyone
    path = standing(path, says=everyone.is_first)
    table = everyone.together(lambda: read_table(path))
    reader, calls = DcpReader(path, table), rank.names.dcp_names()
    prefix = find_prefix((name for names in calls.values() for name in names), table.state_dict_metadata)
    saved = SavedState(str(path))
    in_states = replace(prefix, adds=prefix.adds.removeprefix(MODEL))
    ours = {prefix.in_file(name): MODEL + one for one, names in calls.items() for name in reversed(names)}
    weights = {in_states.in_file(name): one for one, names in calls.items() for name in reversed(names)}
    for name, kind in table.state_dict_metadata.items():
        called: str | None = ours.get(name, None if name.startswith(MODEL) else name)
        if name.startswith(STATE):
            weight, _, key = name.removeprefix(STATE).rpartition(".")
            called = f"{OURS}{weights[weight]}.{key}" if optimizer and weight in weights else None
        if called is None or name.startswith(GROUPS):
            continue
        if isinstance(kind, TensorStorageMetadata):
            for chunk in kind.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                stored = chunk_of(reader, name, offsets, sizes, kind.properties.dtype)
                saved.add(called, name, Placement(tuple(kind.size), sizes, offsets), stored)
        else:
            saved.values[called] = partial(reader.read, MetadataIndex(name))
    fresh = rank.names.may_stay(fresh)
    tensors = {n: k for n, k in table.state_dict_metadata.items() if isinstance(k, TensorStorageMetadata)}
    lacking: dict[str, str] = {}
    for one, names in calls.items():
        if not any(prefix.in_file(name) in tensors for name in names):
            lacking.setdefault(prefix.in_file(names[0]), one)
    unused = require_names(
        path, [name for name in tensors if name.startswith(MODEL)], ours.keys(), lacking, fresh, strict=strict
    )
    StateLoader(saved, rank, is_part=True, takes_states=optimizer).load(everyone.together)
    rank.take_progress(saved)
    values = everyone.together(lambda: {name: saved.values[name]() for name in beside if name in saved.values})
    return LoadedWeights(tuple(lacking.values()), unused, {**dict.fromkeys(beside), **values})
