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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.files.atomic import writing

from ..blocks.plain_values import is_text, quoted
from ..comm.control import ControlGroup
from ..optim.kept import SCALARS, flat_of
from .boxes import Box, Placement
from .dcp_format import Entry, append, file_name, write_table
from .folders import replace_folder
from .held import HeldTensor

MODEL, STATE, GROUPS, STEP = "model.", "optimizer.state.", "optimizer.param_groups.", "engine.step"
FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata")
BESIDE = ("engine.module.", "engine.optimizer.")
"""How names begin of what modules and optimizers keep beside tensors of weights."""

UNSAVED = ("params", "param_names")
"""What of an optimizer's groups names parameters, and is no setting."""


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps for one weight of this rank.

    Attributes:
        state: by key; what is loaded goes in here.
        placement: where those of its tensors lie that have the weight's shape.
        shape: their shape on this rank.
        speaks: whether this rank writes it.
        group: the settings of the weight's group.
    """

    state: dict[str, Any]
    placement: Placement
    shape: tuple[int, ...]
    speaks: bool
    group: Mapping[str, Any]


@dataclass(frozen=True)
class SavedWeight:
    """A tensor of this rank under the names that it has in a checkpoint, and what an optimizer keeps for it."""

    held: HeldTensor
    names: tuple[str, ...]
    kept: Kept | None


def save_dcp(
    path: Path,
    weights: Sequence[SavedWeight],
    step: int,
    kept_beside: Mapping[str, Tensor],
    beside: Mapping[str, object],
    everyone: ControlGroup,
    rank: int,
) -> None:
    """Write the folder; see `CheckpointFiles.save_dcp`. All ranks call this.

    `kept_beside` is what modules and optimizers keep, the same on all ranks that have it, `beside` are values of this
    rank alone.
    """
    everyone.together(lambda: _require_whole_states(weights))

    def write(folder: Path) -> None:
        entries = everyone.together(
            lambda: _write_file(folder / file_name(rank), weights, step, kept_beside, beside, rank)
        )
        mine = json.dumps([asdict(entry) for entry in entries]).encode()
        shared = [Entry(**_tuples(fields)) for theirs in everyone.share_bytes(mine) for fields in json.loads(theirs)]
        everyone.together(lambda: write_table(folder, shared, _paths(shared)) if rank == 0 else None)

    replace_folder(path, "the checkpoint", everyone, rank == 0, FILES, write)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def _paths(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """Return where each name is in the nested state that PyTorch makes of it."""
    names = [name for entry in entries for name in entry.names]
    return {name: tuple(name.split(".", 1)) for name in names}


def _require_whole_states(weights: Sequence[SavedWeight]) -> None:
    """Raise `MisfitError` for state of which nobody can say where it lies in the whole."""
    for weight in weights:
        kept = weight.kept
        if kept is None or kept.placement.is_whole:
            continue
        for key, value in flat_of(kept.state, weight.held.name).items():
            if value.dim() and tuple(value.shape) != kept.shape and not is_text(key):
                raise MisfitError(
                    f"the optimizer's {key!r} of {weight.held.name} is {tuple(value.shape)}, its weight here "
                    f"{kept.shape}: a shard of such a state has no place in a whole one; save with "
                    "checkpoint.format: native"
                )


def _write_file(
    path: Path,
    weights: Sequence[SavedWeight],
    step: int,
    kept_beside: Mapping[str, Tensor],
    beside: Mapping[str, object],
    rank: int,
) -> list[Entry]:
    with writing(path, "the checkpoint"), path.open("wb") as file:
        entries: list[Entry] = []
        for weight in weights:
            if weight.held.speaks:
                names = tuple(MODEL + name for name in weight.names)
                entries += _pieces(file, names, weight.held.boxes(), weight.held.placement.shape)
            if weight.kept is not None and weight.kept.speaks:
                entries += _write_kept(file, weight.names, weight.kept)
        if rank == 0:
            entries += _pieces(file, (STEP,), [Box((), torch.tensor(step))], ())
        for name, tensor in kept_beside.items():
            entries += _pieces(file, (name,), [Box((0,) * tensor.dim(), tensor)], tuple(tensor.shape))
        entries += [_value(file, (name,), value) for name, value in beside.items()]
        file.flush()
        os.fsync(file.fileno())
    return [replace(entry, file=path.name) for entry in entries]


def _write_kept(file: BinaryIO, names: Sequence[str], kept: Kept) -> Iterator[Entry]:
    scalars = {quoted(key): value for key, value in kept.state.items() if type(key) is str and type(value) in SCALARS}
    others = {key: value for key, value in kept.state.items() if type(key) is not str or type(value) not in SCALARS}
    for key, value in {**scalars, **flat_of(others, names[0])}.items():
        called = tuple(f"{STATE}{name}.{key}" for name in names)
        if not isinstance(value, Tensor):
            yield _value(file, called, value)
        elif tuple(value.shape) == kept.shape and not is_text(key):
            yield from _pieces(file, called, kept.placement.boxes(value), kept.placement.shape)
        else:
            whole = Box((0,) * value.dim(), value)
            yield from _pieces(file, called, [whole], tuple(value.shape))
    for key, value in kept.group.items():
        if key not in UNSAVED:
            yield _value(file, tuple(f"{GROUPS}{name}.{key}" for name in names), value)


def _pieces(
    file: BinaryIO, names: tuple[str, ...], boxes: Iterator[Box] | list[Box], shape: tuple[int, ...]
) -> Iterator[Entry]:
    for box in boxes:
        start, length = append(file, box.numbers)
        kind = str(box.numbers.dtype).removeprefix("torch.")
        yield Entry(names, "", start, length, shape, kind, box.offsets, tuple(box.numbers.shape))


def _value(file: BinaryIO, names: tuple[str, ...], value: object) -> Entry:
    start, length = append(file, value)
    return Entry(names, "", start, length)
