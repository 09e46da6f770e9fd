"""Weights written as transformers does: safetensors under the model's own names, and its configuration.

    pp 0   model-00001-of-00003.safetensors     the first rank of each pipeline coordinate writes what its stages have;
    pp 1   model-00002-of-00003.safetensors     those that hold the same stages gather it, a tensor at a time
           model-00003-of-00003.safetensors     (more than `max_file_bytes`)
    rank 0 model.safetensors.index.json, config.json, generation_config.json

One file for all of it is `model.safetensors`, without an index. Gathering takes the bytes of each tensor as they are:
who has some puts them in their places among zeros, and of each byte the largest is taken.
"""

from __future__ import annotations

import copy
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.files.atomic import write_whole, writing

from ..blocks.number_types import TYPES, name_of
from ..comm import Group, ReduceOp
from ..comm.control import ControlGroup, share_bytes
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_model import RankModel
from .boxes import Box
from .folders import replace_folder
from .gpt2 import gpt2_config
from .held import HeldTensor
from .model_names import ModelNames
from .names import Origin
from .safetensors_folder import CONFIG, INDEX, ONE_FILE

WEIGHT_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Files that are replaced, or removed, together."""

GATHERED_BYTES = 2**28
"""The most bytes of a tensor that are gathered at once, where it has several rows."""


@dataclass(frozen=True)
class FileEntry:
    """A tensor as a file is to hold it; `held_as` is our name."""

    name: str
    held_as: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return prod(self.shape) * self.dtype.itemsize


def save_pretrained(
    path: Path,
    names: ModelNames,
    held: Sequence[HeldTensor],
    model: RankModel,
    groups: MeshGroups,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Write the folder; see `CheckpointFiles.save_pretrained`. All ranks call this."""
    everyone, is_first, is_writer = ControlGroup(groups.world), groups.world.index == 0, groups.holders.index == 0
    origins = everyone.together(lambda: _saved_origins(names))
    mine = {one.name: one for one in held if one.name in origins and _is_first_twin(one, model)}
    files = cut_into_files(_entries(mine.values(), origins, groups.holders, dtype), max_file_bytes)
    counts = [int(said) for said in everyone.share_bytes(str(len(files) if is_writer else 0).encode())]
    first, total = 1 + sum(counts[: groups.world.index]), sum(counts)

    def write(folder: Path) -> None:
        done = []
        for number, entries in enumerate(files, first):
            file = TensorFile(folder / weight_file_name(number, total) if is_writer else None, entries)
            for entry in entries:
                for piece in _gathered(entry, mine.get(entry.held_as), origins, groups.holders):
                    file.write(piece)
            done.append(file.close())
        everyone.together(lambda: _raise_first(done))
        homes = {entry.name: weight_file_name(n, total) for n, entries in enumerate(files, first) for entry in entries}
        size = sum(entry.nbytes for entries in files for entry in entries)
        shared = everyone.share_bytes(json.dumps([homes, size] if is_writer else [{}, 0]).encode())
        rest = partial(_write_rest, folder, [json.loads(said) for said in shared], names, dtype or _main_dtype(files))
        everyone.together(rest if is_first else _nothing)

    replace_folder(path, "the weights", everyone, is_first, WEIGHT_FILES, write)


def _nothing() -> None:
    """Do nothing: the first rank does."""


def _raise_first(errors: Sequence[UsageError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _saved_origins(names: ModelNames) -> dict[str, Origin]:
    """Return what is saved, by our names: of tensors that are one, the first.

    A GPT that has not GPT-2's shape goes by our names.
    """
    try:
        origins = names.origins()
    except MisfitError:
        origins = {name: Origin(name) for name in names.ours}
    further = {name for group in names.same() for name in group[1:]}
    found: dict[str, str] = {}
    for name, origin in origins.items():
        if name not in further:
            found.setdefault(origin.name, name)
    return {name: replace(origins[name], name=names.saved_as(origins[name])) for name in found.values()}


def _is_first_twin(one: HeldTensor, model: RankModel) -> bool:
    """Whether of the stages that hold the same part of the model, this tensor is in the first."""
    return model.plan.layout.twins(one.stage)[:1] in ((), (one.stage,))


def _entries(
    mine: Iterable[HeldTensor], origins: Mapping[str, Origin], holders: Group, dtype: torch.dtype | None
) -> list[FileEntry]:
    """Return the tensors that these ranks hold among them; they have to be the same list on all of them."""
    said = [
        [
            origins[one.name].name,
            one.name,
            name_of(dtype if dtype is not None and one.tensor.is_floating_point() else one.tensor.dtype, one.name),
            one.placement.shape[::-1] if origins[one.name].transposed else one.placement.shape,
        ]
        for one in mine
    ]
    shared = share_bytes(holders, json.dumps(said).encode())
    found = {
        held_as: FileEntry(name, held_as, TYPES[kind], tuple(shape))
        for theirs in shared
        for name, held_as, kind, shape in json.loads(theirs)
    }
    return list(found.values())


def cut_into_files(entries: Sequence[FileEntry], max_bytes: int) -> list[list[FileEntry]]:
    """Return the tensors of each file, in order; in a file the widest types come first, so that all are aligned."""
    files: list[list[FileEntry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return [sorted(file, key=lambda entry: -entry.dtype.itemsize) for file in files]


def weight_file_name(number: int, total: int) -> str:
    """Return the name of one of so many files."""
    return ONE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def _gathered(
    entry: FileEntry, held: HeldTensor | None, origins: Mapping[str, Origin], group: Group
) -> Iterator[Tensor]:
    """Yield a tensor's bytes, some rows at a time, on every member of the group: (bytes,), uint8."""
    boxes = list(held.boxes()) if held is not None and held.speaks else []
    if origins[entry.held_as].transposed:
        boxes = [box.turned() for box in boxes]
    rows = entry.shape[0] if entry.shape else 1
    step = max(GATHERED_BYTES * rows // max(entry.nbytes, 1), 1)
    for start in range(0, rows, step):
        window = ((start, *[0] * (len(entry.shape) - 1)), (min(step, rows - start), *entry.shape[1:]))
        offsets, sizes = window if entry.shape else ((), ())
        piece = torch.zeros(sizes, dtype=entry.dtype, device=group.device)
        for box in boxes:
            here = box.within(offsets, sizes)
            if here is not None:
                piece[_moved(here, offsets)] = here.numbers.to(entry.dtype)
        raw = piece.reshape(-1).view(torch.uint8)
        group.all_reduce(raw, ReduceOp.MAX).wait()
        yield raw


def _moved(box: Box, offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(place.start - first, place.stop - first) for place, first in zip(box.places, offsets, strict=True)
    )


class TensorFile:
    """A safetensors file, written tensor by tensor; where that fails, what follows is dropped, and `close` says so.

    Without a path nothing is written: another rank does it.
    """

    def __init__(
        self, path: Path | None, entries: Sequence[FileEntry], metadata: Mapping[str, str] | None = None
    ) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._error: UsageError | None = None
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        at = 0
        for entry in entries:
            place = [at, at + entry.nbytes]
            header[entry.name] = {
                "dtype": name_of(entry.dtype, entry.name),
                "shape": entry.shape,
                "data_offsets": place,
            }
            at += entry.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        if path is not None:
            self._try(lambda: self._begin(path, struct.pack("<Q", len(text)) + text))

    def _begin(self, path: Path, header: bytes) -> None:
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(header)

    def write(self, raw: Tensor) -> None:
        """Append bytes: (bytes,), uint8."""
        file = self._file
        if file is not None and self._error is None:
            self._try(lambda: file.write(raw.cpu().numpy().data))

    def close(self) -> UsageError | None:
        """Bring the file to the disk; return what went wrong."""
        file = self._file
        if file is not None:
            self._try(file.flush)
            self._try(lambda: os.fsync(file.fileno()))
            self._try(file.close)
        return self._error

    def _try(self, work: Callable[[], object]) -> None:
        try:
            with writing(self._path or Path(), "the weights"):
                work()
        except UsageError as error:
            self._error = self._error or error


def _main_dtype(files: Sequence[Sequence[FileEntry]]) -> torch.dtype:
    """Return the floating-point type that has the most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in chain.from_iterable(files):
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] += entry.nbytes
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


def _write_rest(
    folder: Path, shared: Sequence[tuple[dict[str, str], int]], names: ModelNames, dtype: torch.dtype
) -> None:
    """Write what lies beside the weights: the index of several files, and configurations."""
    homes = {name: home for theirs, _ in shared for name, home in theirs.items()}
    if len(set(homes.values())) > 1:
        index = {"metadata": {"total_size": sum(size for _, size in shared)}, "weight_map": dict(sorted(homes.items()))}
        _write_json(folder / INDEX, index)
    kind = str(dtype).removeprefix("torch.")
    if names.config is not None:
        _write_config(folder, names.config, dtype, kind)
    elif names.is_gpt2() and any(origin.transposed for origin in _saved_origins(names).values()):
        _write_json(folder / CONFIG, gpt2_config(names.outlines, tied=bool(names.tied), dtype=kind))
    if names.generation_config is not None:
        names.generation_config.save_pretrained(folder)


def _write_config(folder: Path, config: Any, dtype: torch.dtype, kind: str) -> None:
    """Write a library's configuration, of these weights' type: by itself where it can, else as JSON."""
    if hasattr(config, "save_pretrained"):
        saved = copy.deepcopy(config)
        saved.dtype = dtype
        saved.save_pretrained(folder)
    else:
        _write_json(folder / CONFIG, {**dict(config), "dtype": kind})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, sort_keys=True) + "\n", "the weights", durable=True)
