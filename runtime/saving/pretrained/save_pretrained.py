"""Weights written in transformers' format: safetensors under the model's own names, and its configuration.

    pp 0   model-00001-of-00003.safetensors     the first rank of each pipeline coordinate writes its stages' tensors;
    pp 1   model-00002-of-00003.safetensors     the ranks that hold the same stages gather them, one at a time
           model-00003-of-00003.safetensors     (more than `max_file_bytes`)
    rank 0 model.safetensors.index.json, config.json, generation_config.json

A single file is `model.safetensors`, without an index. Of a model with an adapter of PEFT, rank 0 writes what
`PeftModel.from_pretrained` reads: adapter_model.safetensors, adapter_config.json.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.files.atomic import write_whole, writing

from ...blocks.dtype_names import TYPES, name_of
from ...comm import Group
from ...comm.host_collectives import share_bytes
from ..atomic_output_folder import replace_folder
from ..lazy_tensors import CONFIG, ONE_FILE, SAFETENSORS_INDEX_FILE
from ..rank_tensor_inventory import HeldTensor, RankTensors, gather_boxes
from ..write_tensors import FileEntry, in_file_order, write_tensors
from .foreign_names import TensorOrigin, gpt2_config
from .model_tensor_names import ModelNames

WEIGHTS = "the weights"
"""Name of the files in messages."""

WEIGHT_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Files that are replaced, or removed, together."""

ADAPTER_FILE = "adapter_model.safetensors"

GATHERED_BYTES = 2**28
"""Most bytes of a tensor that are gathered at once, where it has several rows."""


def save_pretrained(path: Path, rank: RankTensors, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    """Write the folder; see `EngineSaves.save_pretrained`. All ranks call this."""
    everyone, groups, names = rank.everyone, rank.groups, rank.names
    is_adapter = names.adapter is not None
    writers = groups.world if is_adapter else groups.holders  # an adapter is one file
    is_writer, max_file_bytes = writers.index == 0, sys.maxsize if is_adapter else max_file_bytes
    origins = everyone.together(lambda: _saved_origins(names))
    mine = {one.name: one for one in rank.held() if one.name in origins and rank.is_first_twin(one)}
    files = cut_into_files(_entries(mine.values(), origins, writers, dtype), max_file_bytes)
    counts = [int(said) for said in everyone.share_bytes(str(len(files) if is_writer else 0).encode())]
    first, total = 1 + sum(counts[: groups.world.index]), sum(counts)

    def write(folder: Path) -> None:
        errors = []
        for number, entries in enumerate(files, first):
            parts = (part for e in entries for part in _gathered(e, mine.get(e.held_as), origins, writers))
            name = ADAPTER_FILE if is_adapter else weight_file_name(number, total)
            file = folder / name if is_writer else None
            errors += _write_all(file, entries, parts)
        everyone.together(lambda: _raise_first(errors))
        homes = {entry.name: weight_file_name(n, total) for n, entries in enumerate(files, first) for entry in entries}
        size = sum(entry.nbytes for entries in files for entry in entries)
        shared = everyone.share_bytes(json.dumps([homes, size] if is_writer else [{}, 0]).encode())
        rest = partial(_write_rest, folder, [json.loads(said) for said in shared], names, dtype or _main_dtype(files))
        everyone.together(lambda: rest() if everyone.is_first else None)

    replace_folder(path, WEIGHTS, everyone, re.compile(re.escape(ADAPTER_FILE)) if is_adapter else WEIGHT_FILES, write)


def _write_all(path: Path | None, entries: Sequence[FileEntry], parts: Iterator[Tensor]) -> list[UsageError]:
    """Write a file, and return errors; all parts are gathered even then, since gathering is collective."""
    errors = []
    try:
        if path is not None:
            with writing(path, WEIGHTS):
                write_tensors(path, entries, parts, {"format": "pt"})
    except UsageError as error:
        errors.append(error)
    deque(parts, maxlen=0)
    return errors


def _raise_first(errors: Sequence[UsageError]) -> None:
    for error in errors:
        raise error


def _saved_origins(names: ModelNames) -> dict[str, TensorOrigin]:
    """Return the tensors that are saved, by our names; of tied tensors, the first.

    A GPT that has not GPT-2's shape is saved under our names. Of a model with an adapter, only that is saved.
    """
    if names.adapter is not None:
        if names.adapter.others:
            raise MisfitError(
                f"the model has several adapters ({', '.join(names.adapter.others)} besides the first), and one is "
                "written; split a model with that one alone"
            )
        own, called = names.own or {}, names.adapter.names
        return {name: TensorOrigin(called[own[name]]) for name in names.ours if own.get(name) in called}
    try:
        origins = names.origins()
    except MisfitError:
        origins = {name: TensorOrigin(name) for name in names.ours}
    further = {name for group in names.same() for name in group[1:]}
    found: dict[str, str] = {}
    for name, origin in origins.items():
        if name not in further:
            found.setdefault(origin.name, name)
    return {name: replace(origins[name], name=names.saved_as(origins[name])) for name in found.values()}


def _entries(
    mine: Iterable[HeldTensor], origins: Mapping[str, TensorOrigin], holders: Group, dtype: torch.dtype | None
) -> list[FileEntry]:
    """Return the tensors that these ranks hold together; the list is the same on all of them."""
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
    """Return the tensors of each file, in file order."""
    files: list[list[FileEntry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return list(map(in_file_order, files))


def weight_file_name(number: int, total: int) -> str:
    """Return the file name of the `number`-th of `total` files."""
    return ONE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def write_index(folder: Path, homes: Mapping[str, str], num_bytes: int) -> None:
    """Write the index, tensor to file, where there are several files; raises `UsageError`."""
    if len(set(homes.values())) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(homes.items()))}
        _write_json(folder / SAFETENSORS_INDEX_FILE, index)


def _gathered(
    entry: FileEntry, held: HeldTensor | None, origins: Mapping[str, TensorOrigin], group: Group
) -> Iterator[Tensor]:
    """Yield a tensor, some rows at a time, on every member of the group."""
    boxes = list(held.boxes()) if held is not None and held.speaks else []
    turned = origins[entry.held_as].transposed
    shape = entry.shape[::-1] if turned else entry.shape
    rows = entry.shape[0] if entry.shape else 1
    step = max(GATHERED_BYTES * rows // max(entry.nbytes, 1), 1)
    for start in range(0, rows, step):
        dim, size = -1 if turned else 0, min(step, rows - start)
        sizes, offsets = list(shape), [0] * len(shape)
        if shape:
            sizes[dim], offsets[dim] = size, start
        piece = gather_boxes(boxes, sizes, entry.dtype, group, offsets)
        yield piece.t() if turned else piece


def _main_dtype(files: Sequence[Sequence[FileEntry]]) -> torch.dtype:
    """Return the floating-point dtype that has the most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in chain.from_iterable(files):
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] += entry.nbytes
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()


def _write_rest(
    folder: Path, shared: Sequence[tuple[dict[str, str], int]], names: ModelNames, dtype: torch.dtype
) -> None:
    """Write the files beside the weights: the index of several files, and configurations."""
    if names.adapter is not None:
        saved = copy.copy(names.adapter.config)
        saved.inference_mode = True  # as PEFT saves it
        saved.save_pretrained(folder)
        return
    homes = {name: home for theirs, _ in shared for name, home in theirs.items()}
    write_index(folder, homes, sum(size for _, size in shared))
    kind = str(dtype).removeprefix("torch.")
    if names.config is not None:
        _write_config(folder, names.config, dtype, kind)
    elif names.is_gpt2() and any(origin.transposed for origin in _saved_origins(names).values()):
        _write_json(folder / CONFIG, gpt2_config(names.outlines, tied=bool(names.tied), dtype=kind))
    if names.generation_config is not None:
        names.generation_config.save_pretrained(folder)


def _write_config(folder: Path, config: Any, dtype: torch.dtype, kind: str) -> None:
    """Write a library's configuration with these weights' dtype: by its own method where it has one, else as JSON."""
    if hasattr(config, "save_pretrained"):
        saved = copy.deepcopy(config)
        saved.dtype = dtype
        saved.save_pretrained(folder)
    else:
        _write_json(folder / CONFIG, {**dict(config), "dtype": kind})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, sort_keys=True) + "\n", WEIGHTS, durable=True)
