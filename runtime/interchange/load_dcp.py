"""A checkpoint of PyTorch's distributed format as a rank reads it: its own boxes, from whatever chunks there are.

    chunks in the files    [   0   ][   1   ][   2   ]      written by any mesh, or by FSDP
    boxes of this rank          [▓▓▓▓▓▓▓]                   read: what each chunk has of them

`save_dcp` says what the names are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from quintsched.errors import InputError, MisfitError, nearest

from ..blocks.number_types import require_kind
from ..blocks.plain_values import is_text
from ..comm.control import ControlGroup
from ..optim.kept import KeptMemory, kept_of
from .boxes import Box
from .dcp_format import TABLE, PieceReader, read_table
from .folders import standing
from .load_pretrained import LoadedWeights, listed
from .names import Prefix, find_prefix, matches
from .save_dcp import BESIDE, MODEL, STATE, STEP, Kept, SavedWeight


@torch.no_grad()
def load_dcp(
    path: Path,
    weights: Sequence[SavedWeight],
    everyone: ControlGroup,
    *,
    fresh: Sequence[str],
    strict: bool,
    optimizer: bool,
    beside: Sequence[str] = (),
) -> tuple[LoadedWeights, int, dict[str, Tensor]]:
    """Let what this rank holds be what a checkpoint has; see `CheckpointFiles.load_dcp`.

    Return also its step, and what modules and optimizers kept beside.
    """
    path = standing(path, says=everyone.is_first)
    table = everyone.together(lambda: read_table(path))
    everyone.together(lambda: _require_sane(path, table))
    with PieceReader(path, table) as pieces:
        loader = _Loader(path, table, pieces, _prefix(table, weights, everyone))
        loaded = loader.compare(weights, everyone, fresh, strict=strict)
        everyone.together(lambda: loader.load(weights, optimizer=optimizer))
        step, values = everyone.together(lambda: (loader.step(), {name: loader.value(name) for name in beside}))
        return replace(loaded, beside=values), step, everyone.together(loader.beside)


def _require_sane(path: Path, table: Metadata) -> None:
    for name, kind in table.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(kind, TensorStorageMetadata | BytesStorageMetadata):
            raise InputError(f"{path / TABLE}: {name!r} is neither a tensor nor a value")


def _prefix(table: Metadata, weights: Sequence[SavedWeight], everyone: ControlGroup) -> Prefix:
    """Return how the names of the whole model are to be changed for this checkpoint: most often by "model."."""
    mine = json.dumps([name for weight in weights for name in weight.names]).encode()
    names = [name for theirs in everyone.share_bytes(mine) for name in json.loads(theirs)]
    return find_prefix(names, table.state_dict_metadata.keys())


class _Loader:
    """One rank's reading of a checkpoint."""

    def __init__(self, path: Path, table: Metadata, pieces: PieceReader, prefix: Prefix) -> None:
        self._path, self._pieces, self._prefix = path, pieces, prefix
        self._in_states = replace(prefix, adds=prefix.adds.removeprefix(MODEL))
        found = table.state_dict_metadata.items()
        self._tensors = {name: kind for name, kind in found if isinstance(kind, TensorStorageMetadata)}
        self._values = {name for name, kind in found if isinstance(kind, BytesStorageMetadata)}
        self._states: dict[str, list[str]] = {}
        for name in table.state_dict_metadata:
            if name.startswith(STATE):
                of_weight, _, key = name.removeprefix(STATE).rpartition(".")
                self._states.setdefault(of_weight, []).append(key)

    def _found(self, weight: SavedWeight) -> str | None:
        """Return the name under which a weight is there, or None."""
        return next((name for name in map(self._prefix.in_file, weight.names) if name in self._tensors), None)

    def compare(
        self, weights: Sequence[SavedWeight], everyone: ControlGroup, fresh: Sequence[str], *, strict: bool
    ) -> LoadedWeights:
        """Raise on every rank the same error where names or shapes do not fit; else say what is fresh, and unused."""
        everyone.together(lambda: self._require_fit(weights))
        used = [self._prefix.in_file(name) for weight in weights for name in weight.names]
        lacking = [(self._prefix.in_file(w.names[0]), w.held.name) for w in weights if self._found(w) is None]
        shared = [json.loads(said) for said in everyone.share_bytes(json.dumps([used, lacking]).encode())]
        all_used = {name for used, _ in shared for name in used}
        missing = {name: ours for _, lacking in shared for name, ours in lacking}
        unused = [name for name in self._tensors if name.startswith(MODEL) and name not in all_used]
        refused = [name for name, ours in missing.items() if not (matches(name, fresh) or matches(ours, fresh))]
        if refused:
            raise InputError(
                f"{self._path}: the checkpoint has no {listed(refused)}{nearest(refused[0], unused or self._tensors)}; "
                "where weights are to keep their initial values, say so with fresh=[…]"
            )
        if unused and strict:
            raise MisfitError(
                f"{self._path}: the model has no weight for {listed(unused)}{nearest(unused[0], all_used)}; leave that "
                "out with strict=False"
            )
        return LoadedWeights(tuple(missing.values()), tuple(unused))

    def _require_fit(self, weights: Sequence[SavedWeight]) -> None:
        for weight in weights:
            name = self._found(weight)
            if name is not None and tuple(self._tensors[name].size) != weight.held.placement.shape:
                raise MisfitError(
                    f"{self._path}: {name!r} is {tuple(self._tensors[name].size)}, but {weight.held.name} needs "
                    f"{weight.held.placement.shape}"
                )
            if name is not None:
                found = self._tensors[name].properties.dtype
                require_kind(str(self._path), name, found, weight.held.name, weight.held.tensor.dtype)

    def load(self, weights: Sequence[SavedWeight], *, optimizer: bool) -> None:
        """Read what this rank holds, and with `optimizer` what its optimizers keep."""
        for weight in weights:
            name = self._found(weight)
            if name is not None:
                self._fill(name, list(weight.held.boxes()))
            if optimizer and weight.kept is not None and self._states:
                self._load_kept(weight, weight.kept)

    def _load_kept(self, weight: SavedWeight, kept: Kept) -> None:
        assert weight.held.numbers is not None
        memory = KeptMemory(kept.state, weight.held.numbers)
        flat: dict[str, object] = {}
        for called in map(self._in_states.in_file, weight.names):
            for key in self._states.get(called, ()):
                if key not in flat:
                    flat[key] = self._state(f"{STATE}{called}.{key}", key, weight, kept, memory)
        kept.state.update(kept_of(flat, weight.held.tensor.device))

    def _state(self, name: str, key: str, weight: SavedWeight, kept: Kept, memory: KeptMemory) -> object:
        if name in self._values:
            return self._pieces.value(name)
        stored, device = self._tensors[name], weight.held.tensor.device
        size = tuple(stored.size)
        if size == kept.placement.shape and size and not is_text(key):
            value = memory.take(key, kept.shape, stored.properties.dtype, device)
            self._fill(name, list(kept.placement.boxes(value)))
            return value
        if size and not kept.placement.is_whole and not is_text(key):
            raise MisfitError(
                f"{self._path}: {name!r} is {size}, and its weight {kept.placement.shape}: of such a state no rank "
                "of this mesh can say which part is its own; load it with optimizer=False"
            )
        value = torch.empty(size, dtype=stored.properties.dtype)
        self._fill(name, [Box((0,) * len(size), value)])
        on_host = key == "step" and not (kept.group.get("capturable") or kept.group.get("fused"))
        return value if on_host else value.to(device)

    def _fill(self, name: str, boxes: Sequence[Box]) -> None:
        """Read into boxes what they have in common with the chunks of a tensor; together these have to be all."""
        filled = 0
        for offsets, sizes in self._pieces.chunks(name):
            common = [box for one in boxes if (box := one.within(offsets, sizes)) is not None]
            if not common:
                continue
            chunk = self._pieces.chunk(name, offsets, sizes)
            for box in common:
                inside = tuple(
                    slice(place.start - first, place.stop - first)
                    for place, first in zip(box.places, offsets, strict=True)
                )
                box.numbers.copy_(chunk[inside])
                filled += box.numbers.numel()
        if filled != sum(box.numbers.numel() for box in boxes):
            raise InputError(f"{self._path}: the chunks of {name!r} are not all there, or overlap")

    def step(self) -> int:
        """Return how many steps were made; 0 where the checkpoint does not say."""
        if STEP not in self._tensors:
            return 0
        value = torch.zeros((), dtype=torch.int64)
        self._fill(STEP, [Box((), value)])
        return int(value)

    def beside(self) -> dict[str, Tensor]:
        """Return what modules and optimizers keep beside tensors of weights."""
        found = {}
        for name in self._tensors:
            if name.startswith(BESIDE):
                size = tuple(self._tensors[name].size)
                found[name] = torch.empty(size, dtype=self._tensors[name].properties.dtype)
                self._fill(name, [Box((0,) * len(size), found[name])])
        return found

    def value(self, name: str) -> object:
        """Return a value of this rank's own; None where there is none."""
        return self._pieces.value(name) if name in self._values else None
