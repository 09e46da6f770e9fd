"""Files of outputs: those of a forward run, one writer for each replica, in the order of the samples.

    DIR/outputs-00000-00000.safetensors     of replica 0, samples 0 to 2
    DIR/outputs-00000-00001.safetensors     of replica 0, sample 3
    DIR/outputs-00001-00000.safetensors     of replica 1, samples 4 to 6
    DIR/index.json                          {"format": "quintsched.outputs", "version": 1, "samples": 7, "files": [
        {"name": "outputs-00000-00000.safetensors", "replica": 0, "samples": [0, 3], "tensors": {"logits": [3, 10]}},
        …]}

A file has the outputs of some samples that follow each other, joined along dimension 0, and the next file those of the
next ones. A tensor goes by its place in the output: "outputs" where that is one tensor, "logits" of {"logits": …},
"hidden.1" of a second tensor in {"hidden": (…, …)}; what is no tensor is left out. A new file begins where a file would
get too long, and where outputs have another shape or type than those before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from quintsched.errors import UsageError
from quintsched.files.atomic import write_whole, writing

from ..blocks.trees import flatten
from .write_tensors import FileEntry, in_file_order, write_tensors

OUTPUTS = "the outputs"
"""Name of the outputs in messages."""

OUTPUT_INDEX_FILE = "index.json"
OUTPUT_FILES = re.compile(r"outputs-\d{5}-\d{5}\.safetensors|index\.json")
"""Files that are replaced, or removed, together."""

ONE_TENSOR_NAME = "outputs"
"""The name of an output that is one tensor."""

NamedOutputs = dict[str, Tensor]


class OutputFiles:
    """Writes the outputs of one replica.

    Args:
        folder: where files go.
        replica: its number, which their names begin with.
        max_bytes: a new file begins beyond this size.
    """

    def __init__(self, folder: Path, replica: int, max_bytes: float) -> None:
        self._folder, self._replica, self._max_bytes = folder, replica, max_bytes
        self._kept: list[NamedOutputs] = []
        self._num_bytes = self._first = self._samples = 0
        self._files: list[dict[str, Any]] = []

    def add_outputs(self, outputs: Any, samples: int) -> None:
        """Take the outputs of further samples, a tree; raises `UsageError` where they cannot be written."""
        named = named_outputs(outputs)
        size = sum(tensor.nbytes for tensor in named.values())
        if self._kept and (_kinds(named) != _kinds(self._kept[0]) or self._num_bytes + size > self._max_bytes):
            self._write()
        self._kept.append({name: tensor.detach().cpu() for name, tensor in named.items()})
        self._num_bytes += size
        self._samples += samples

    def finish_files(self) -> list[dict[str, Any]]:
        """Write what is left, and return what the index says of each file, samples counted within the replica."""
        if self._kept:
            self._write()
        return self._files

    def _write(self) -> None:
        kept = self._kept
        entries = in_file_order(
            FileEntry(name, name, tensor.dtype, (sum(len(one[name]) for one in kept), *tensor.shape[1:]))
            for name, tensor in kept[0].items()
        )
        path = self._folder / f"outputs-{self._replica:05d}-{len(self._files):05d}.safetensors"
        with writing(path, OUTPUTS):
            written = write_tensors(path, entries, (one[entry.name] for entry in entries for one in kept))
        said = {"name": path.name, "replica": self._replica, "samples": [self._first, self._samples]}
        shapes = {entry.name: list(entry.shape) for entry in entries}
        self._files.append({**said, "tensors": shapes, "bytes": written.bytes, "sha256": written.sha256})
        self._kept, self._num_bytes, self._first = [], 0, self._samples


def named_outputs(outputs: Any) -> NamedOutputs:
    """Return the tensors of a tree by names; raises `UsageError` where there are none, or two of one name."""
    tree, tensors = flatten(outputs)
    names = [".".join(re.findall(r"[^\[\].'\"]+", path)) or ONE_TENSOR_NAME for path in tree.paths]
    if len(set(names)) < len(names) or not names:
        raise UsageError(f"outputs cannot be written by name: the last block gives {tree}; give tensors, by other keys")
    return dict(zip(names, tensors, strict=True))


def _kinds(named: NamedOutputs) -> list[tuple[object, ...]]:
    return [(name, tensor.dtype, *tensor.shape[1:]) for name, tensor in named.items()]


def write_index(folder: Path, replicas: Sequence[Sequence[dict[str, Any]]]) -> tuple[int, int]:
    """Write which file has which samples, replica by replica; return how many samples, and how many files there are."""
    files = list(_counted_on(replicas))
    samples = files[-1]["samples"][1] if files else 0
    index = {"format": "quintsched.outputs", "version": 1, "samples": samples, "files": files}
    write_whole(folder / OUTPUT_INDEX_FILE, json.dumps(index, indent=1) + "\n", OUTPUTS, durable=True)
    return samples, len(files)


def _counted_on(replicas: Sequence[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what is said of files, with samples counted on from replica to replica."""
    before = 0
    for files in replicas:
        for file in files:
            yield {**file, "samples": [before + number for number in file["samples"]]}
        before += files[-1]["samples"][1] if files else 0
