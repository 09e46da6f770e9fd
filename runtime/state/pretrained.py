"""Pretrained weights: each rank reads from safetensors files no more than the slices that it holds.

    file    h.0.attn.c_attn.weight (D, 3D)     ░░▓░░▓░░▓    ▓: the columns that this rank reads,
    rank    1.attention.qkv.weight (3D/tp, D)  ▓▓▓          joined, transposed, and cast to the weight's type

A checkpoint is one file, a directory with `model.safetensors`, or one with several files and the index that says which
tensor lies where, `model.safetensors.index.json`. Names are in `pretrained_formats`. Nothing in a checkpoint is ever
resolved to code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import InputError, MisfitError, UsageError, nearest
from quintsched.files.strictjson import describe_faults, parse_strict

from ..parallel.tensor.shard import Shard, shard_of
from ..stage.build import Stage
from .master_weights import Masters
from .pretrained_formats import GPT2, Family, Origin

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
CONFIG = "config.json"
Place = tuple[slice, ...]


def load_pretrained(
    stages: Mapping[int, Stage],
    masters: Masters,
    path: str | Path,
    *,
    num_blocks: int,
    tied: Mapping[str, Sequence[str]],
    family: Family = GPT2,
) -> None:
    """Let this rank's weights be those of a checkpoint, in place; a tied weight is read from its first name's tensor.

    Positions are cut short to those of the model. What shapes do not show (heads, activation, epsilon) is checked
    against the `config.json` that lies beside, if one does.

    Args:
        stages: this rank's stages.
        masters: the weights that its optimizer works on.
        path: a file, an index, or the directory of either.
        num_blocks: how many blocks the whole model has.
        tied: names of the weights that are one.
        family: what the checkpoint's tensors are called.

    Raises:
        UsageError: there is no such file.
        InputError: a file that is damaged, or lacks a tensor.
        MisfitError: a model of other options, or a tensor of another shape.
    """
    with _open_checkpoint(Path(path), family) as checkpoint, torch.no_grad():
        checkpoint.require_layers(num_blocks - 2)
        for stage in stages.values():
            for number, block in stage.blocks.items():
                _require_same_options(checkpoint, block, int(number), num_blocks)
            for name, parameter in _named(stage):
                if isinstance(parameter, DTensor):
                    raise MisfitError(f"{name} is a DTensor; load the checkpoint before PyTorch shards the module")
                found = _read_weight(checkpoint, name, parameter, num_blocks, tied)
                masters.load(parameter, found)
        masters.publish(list(stages))


def _named(stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights by their names in the whole model, one that has several names by each of them."""
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        yield name.removeprefix("blocks."), parameter


def _require_same_options(checkpoint: _Checkpoint, block: nn.Module, number: int, num_blocks: int) -> None:
    """Raise `MisfitError` where a block has other weights than the family's, or was built with other options."""
    family = checkpoint.family
    names = {name for name, _ in block.named_parameters(remove_duplicate=False)}
    odd = sorted(names ^ family.origins(number, num_blocks).keys())
    if odd:
        where = "the model" if odd[0] in names else "the checkpoint"
        raise MisfitError(
            f"{checkpoint.path}: the model is no {family.name}: only {where} has {odd[0]!r} in block {number}; "
            f"{family.name} checkpoints need a gpt with {family.needs}"
        )
    try:
        family.require(block, checkpoint.config)
    except MisfitError as error:
        raise MisfitError(f"{checkpoint.path}: {error}") from None
    except ValidationError as error:
        raise InputError(f"{checkpoint.path.parent / CONFIG}: {describe_faults(error)}") from None


def _read_weight(
    checkpoint: _Checkpoint, name: str, parameter: nn.Parameter, num_blocks: int, tied: Mapping[str, Sequence[str]]
) -> Tensor:
    """Return what a weight is to be; tied weights are one in the file as well, or alike."""
    origin = _origin_of(checkpoint.family, name, num_blocks)
    found = checkpoint.read(origin, name, parameter)
    firsts = [names[0] for names in tied.values() if name in names[1:]]
    for first in firsts:
        other = _origin_of(checkpoint.family, first, num_blocks)
        if checkpoint.find(other) != checkpoint.find(origin) and not torch.equal(
            found, checkpoint.read(other, name, parameter)
        ):
            raise MisfitError(
                f"{checkpoint.path}: {checkpoint.find(origin)!r} and {checkpoint.find(other)!r} differ, but the model "
                f"ties {name} and {first}; build it untied"
            )
    return found


def _origin_of(family: Family, name: str, num_blocks: int) -> Origin:
    number, _, within = name.partition(".")
    return family.origins(int(number), num_blocks)[within]


class _Checkpoint:
    """The tensors of a checkpoint, wherever they lie; a file is opened when it is first read, and then stays so."""

    def __init__(self, path: Path, family: Family, homes: Mapping[str, Path], files: _Files) -> None:
        self.path = path
        self.family = family
        self.config = _read_config(path.parent / CONFIG)
        self._homes = homes
        self._files = files

    def require_layers(self, depth: int) -> None:
        """Raise `MisfitError` unless the checkpoint has as many layers as the model has transformer blocks."""
        prefixes = "|".join(map(re.escape, self.family.prefixes))
        found = [re.match(f"(?:{prefixes}){self.family.layer_pattern}", name) for name in self._homes]
        layers = 1 + max((int(match[1]) for match in found if match), default=-1)
        if layers != depth:
            raise MisfitError(
                f"{self.path}: the checkpoint has {layers} layers, the model {depth}; set depth: {layers}"
            )

    def find(self, origin: Origin) -> str:
        """Return the name of a tensor as it is in the file."""
        wanted = [origin.name] if origin.otherwise is None else [origin.name, origin.otherwise]
        for name in (f"{prefix}{name}" for name in wanted for prefix in self.family.prefixes):
            if name in self._homes:
                return name
        raise InputError(
            f"{self.path}: the checkpoint has no tensor {origin.name!r}{nearest(origin.name, self._homes)}"
        )

    def read(self, origin: Origin, name: str, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of a tensor, in the model's orientation; `name` is what it is for."""
        tensor = self.find(origin)
        shard = shard_of(parameter)
        wanted = list(parameter.shape)
        if shard is not None:
            wanted[shard.dim] *= shard.size
        lying = self._files.open(self._homes[tensor]).get_slice(tensor)
        turn = -1 if origin.transposed else 1
        _require_shape(self.path, tensor, list(lying.get_shape()), name, wanted[::turn], origin.is_cut_short)
        found: list[Tensor] = [lying[place[::turn]] for place in _places(wanted, shard)]
        if origin.transposed:
            found = [matrix.t() for matrix in found]
        return found[0] if shard is None else torch.cat(found, shard.dim)


def _places(shape: Sequence[int], shard: Shard | None) -> list[Place]:
    """Return the places in a full tensor that make up a shard: one in each of the matrices fused in it."""
    whole = tuple(slice(0, size) for size in shape)
    if shard is None:
        return [whole]
    places = shard.places(shape[shard.dim])
    return [(*whole[: shard.dim], place, *whole[shard.dim + 1 :]) for place in places]


def _require_shape(
    path: Path, tensor: str, found: Sequence[int], name: str, wanted: Sequence[int], is_cut_short: bool
) -> None:
    """Raise `MisfitError` that names the axis where a tensor has another size than the weight that it is for."""
    fits = [
        has == wants or (is_cut_short and axis == 0 and has > wants)
        for axis, (has, wants) in enumerate(zip(found, wanted, strict=False))
    ]
    if len(found) == len(wanted) and all(fits):
        return
    where = f"axis {fits.index(False)} differs" if len(found) == len(wanted) else "it has other axes"
    raise MisfitError(f"{path}: {tensor!r} is {tuple(found)}, but {name} needs {tuple(wanted)}: {where}")


class _Files:
    """Files of tensors that are open until the stack is closed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def open(self, path: Path) -> Any:
        """Return the open file; raises `InputError` for one that is damaged or not there."""
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: not a safetensors file: {error}") from error
        return self._open[path]


@contextmanager
def _open_checkpoint(path: Path, family: Family) -> Iterator[_Checkpoint]:
    """Open a checkpoint: a file, an index, or the directory of either."""
    if path.is_dir():
        path = path / (INDEX if (path / INDEX).exists() else ONE_FILE)
    if not path.exists():
        raise UsageError(f"{path}: no such file; a checkpoint is a safetensors file, or a directory with {ONE_FILE}")
    with ExitStack() as stack:
        files = _Files(stack)
        homes = _read_index(path) if path.suffix == ".json" else dict.fromkeys(files.open(path).keys(), path)
        yield _Checkpoint(path, family, homes, files)


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    weight_map: dict[str, str]


def _read_index(path: Path) -> dict[str, Path]:
    """Return in which file each tensor lies; all of them lie beside the index."""
    try:
        names = _Index.model_validate(_read_json(path)).weight_map
    except ValidationError as error:
        raise InputError(f"{path}: {describe_faults(error)}") from None
    for name in names.values():
        if Path(name).name != name:
            raise InputError(f"{path}: {name!r} is not the name of a file beside it")
    return {tensor: path.parent / name for tensor, name in names.items()}


def _read_config(path: Path) -> dict[str, Any]:
    """Return what a model says of itself, or nothing where it says nothing."""
    if not path.exists():
        return {}
    config = _read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path}: it must hold an object")
    return config


def _read_json(path: Path) -> object:
    try:
        return parse_strict(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
