"""Export of a checkpoint's weights as safetensors, under the model's own names; streamed in windows.

    rank-00000.safetensors ─┐                            ┌─▶ one file, out.safetensors
    rank-00001.safetensors ─┴─▶ SavedState ─▶ windows ───┴─▶ a folder: model-00001-of-00003.safetensors …, and an index

Weights have the dtype that blocks compute with; masters, or averages, are written on request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from quintsched.errors import UsageError
from quintsched.files.atomic import sync_directory, writing

from ...comm.host_collectives import ControlGroup
from ...comm.transport_interface import SelfGroup
from ..atomic_output_folder import replace_folder
from ..checkpoints.folder_owner import require_no_run, require_no_step
from ..pretrained.save_pretrained import WEIGHT_FILES, WEIGHTS, cut_into_files, weight_file_name, write_index
from ..saved_state import AVERAGE, MODEL, SavedState
from ..write_tensors import FileEntry, in_file_order, write_tensors

SUFFIX = ".safetensors"


class Exported(NamedTuple):
    """Result of an export: files, number of tensors, bytes; `tied` maps a written name to others of the same tensor."""

    files: tuple[Path, ...]
    tensors: int
    num_bytes: int
    tied: Mapping[str, Sequence[str]]


def export(
    saved: SavedState, output: Path, *, average: int | None = None, masters: bool = False, max_file_bytes: int
) -> Exported:
    """Write a checkpoint's weights and buffers to a file, or to a folder in files of at most so many bytes.

    `average` is the number of an average to write in place of the weights that it covers; `masters` keeps the dtype
    of the master weights. Raises `UsageError` where there is no such average, nothing can be written, or
    the folder is that of a run.
    """
    entries, tied = _entries(saved, average, masters=masters)
    metadata = {other: first for first, others in tied.items() for other in others}  # as safetensors' save_model does
    num_bytes = sum(entry.nbytes for entry in entries)
    if output.suffix == SUFFIX:
        require_no_step(output.parent)
        _write_one(saved, output, in_file_order(entries), metadata)
        return Exported((output,), len(entries), num_bytes, tied)
    require_no_run(output)
    files = cut_into_files(entries, max_file_bytes)
    names = [weight_file_name(number, len(files)) for number in range(1, len(files) + 1)]

    def write(folder: Path) -> None:
        for name, held in zip(names, files, strict=True):
            _write(saved, folder / name, held, metadata)
        write_index(
            folder, {entry.name: name for name, held in zip(names, files, strict=True) for entry in held}, num_bytes
        )

    replace_folder(output, WEIGHTS, ControlGroup(SelfGroup(0, torch.device("cpu"))), WEIGHT_FILES, write)
    return Exported(tuple(output / name for name in names), len(entries), num_bytes, tied)


def _entries(saved: SavedState, average: int | None, *, masters: bool) -> tuple[list[FileEntry], dict[str, list[str]]]:
    """Return the tensors to write, and the tied names of each; of tied tensors, the first is written."""
    own: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for layout in saved.layouts:
        own |= layout.own_names
        dtypes |= layout.dtypes
    averaged = {name.removeprefix(f"{AVERAGE}{average}.") for name in saved.pieces} if average is not None else set()
    if average is not None and f"{AVERAGE}{average}.updates" not in saved.pieces:
        raise UsageError(f"{saved.where}: the checkpoint has no average of weights {average}; leave out --ema")
    firsts, tied = _firsts(saved)
    entries = []
    for name in saved.pieces:
        ours = name.removeprefix(MODEL)
        if not name.startswith(MODEL) or firsts.get(ours, ours) != ours:
            continue
        source = f"{AVERAGE}{average}.{ours}" if ours in averaged else name
        dtype = saved.dtype(source) if masters or name not in dtypes else getattr(torch, dtypes[name])
        entries.append(FileEntry(own.get(ours, ours), source, dtype, saved.shape(source)))
    return entries, {own.get(first, first): [own.get(one, one) for one in others] for first, others in tied.items()}


def _firsts(saved: SavedState) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the name under which each tied tensor is written, and by that name its other names."""
    firsts: dict[str, str] = {}
    tied: dict[str, list[str]] = {}
    for group in saved.layouts[0].same if saved.layouts else ():
        there = [name for name in group if MODEL + name in saved.pieces and name not in firsts]
        firsts.update(dict.fromkeys(there, there[0]) if there else {})
        if len(there) > 1:
            tied[there[0]] = there[1:]
    return firsts, tied


def _write_one(saved: SavedState, output: Path, entries: Sequence[FileEntry], metadata: Mapping[str, str]) -> None:
    fresh = output.with_name(f".{output.name}.saving")
    with writing(output, WEIGHTS):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(saved, fresh, entries, metadata)
            os.replace(fresh, output)
            sync_directory(output.parent)
        finally:
            fresh.unlink(missing_ok=True)


def _write(saved: SavedState, path: Path, entries: Sequence[FileEntry], metadata: Mapping[str, str]) -> None:
    parts = (window.to(entry.dtype) for entry in entries for window in saved.windows(entry.held_as))
    write_tensors(path, entries, parts, {"format": "pt", **metadata})
