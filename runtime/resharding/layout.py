"""How what a rank saves lies in the whole model: what makes its file fit any other mesh.

    rank-00002.safetensors   __metadata__  quintsched.layout: {…, "tensors": {"model.3.qkv.weight": 0, …}}
                             "model.3.qkv.weight"                     [▓▓▓▓▓]         numbers 4 to 9 of the flat …
                                                                         │
    layout.placements["model.3.qkv.weight"]     · ▓ · ▓ · ▓  ◀───────────┘            … shard 1 of 2, of three blocks
                                                · ▓ · ▓ · ▓

A tensor of which the layout says nothing is whole. `beside` are states of an optimizer that have not the shape of the
weight, where that is cut: only a rank that cuts it alike can take them, unless they are values that all have alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from quintsched.errors import InputError
from quintsched.files.strictjson import describe_faults, parse_strict

from ..blocks.plain_values import is_text
from ..interchange.boxes import Placement
from ..interchange.exchange import Exchange
from ..optim.kept import flat_of
from ..parallel.tensor.shard import Shard
from ..weights.average import WeightAverage

LAYOUT = "quintsched.layout"
"""The name of the layout in a file's metadata."""

RUN = "quintsched.run"
"""The name there of the run that wrote the file, where it says so: files of two runs are of no one state."""

Size = Field(ge=0)


@dataclass(frozen=True)
class StateLayout:
    """What a rank's file says of its tensors.

    Attributes:
        replica: which replica of the batch the rank belonged to, and how many there were.
        placements: by tensor, where its numbers lie in the full one; what is not named is whole.
        beside: by tensor that has no place, how the weight is held that it belongs to.
        dtypes: by tensor, the type in which blocks compute with it, where it is kept in another ("bfloat16").
        own_names: what the model itself calls the weights, by our names, where that differs.
        same: names of ours that are one tensor.
    """

    replica: tuple[int, int] = (0, 1)
    placements: Mapping[str, Placement] = field(default_factory=dict)
    beside: Mapping[str, Placement] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    own_names: Mapping[str, str] = field(default_factory=dict)
    same: Sequence[Sequence[str]] = ()

    def to_text(self) -> str:
        """Return the JSON text of it."""
        used = {placement: number for number, placement in enumerate(dict.fromkeys(self._all()))}
        said = {
            "version": 1,
            "replica": self.replica,
            "placements": [_to_words(placement) for placement in used],
            "tensors": {name: used[placement] for name, placement in self.placements.items()},
            "beside": {name: used[placement] for name, placement in self.beside.items()},
            "dtypes": dict(self.dtypes),
            "own_names": dict(self.own_names),
            "same": [list(names) for names in self.same],
        }
        return json.dumps(said, separators=(",", ":"))

    def holds_as(self, other: StateLayout) -> bool:
        """Whether two ranks have cut their weights alike; what is kept beside a weight is cut as it is."""
        return self._of_weights() == other._of_weights()

    def _of_weights(self) -> dict[str, Placement]:
        return {name: placement for name, placement in self.placements.items() if name.startswith("model.")}

    def _all(self) -> Iterator[Placement]:
        yield from self.placements.values()
        yield from self.beside.values()

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> StateLayout | None:
        """Return what the metadata of a file say; None where they say nothing. Raises as `from_text`."""
        return cls.from_text(metadata[LAYOUT]) if LAYOUT in metadata else None

    @classmethod
    def from_text(cls, text: str) -> StateLayout:
        """Return what `to_text` wrote; raises `InputError` with the place of the first fault."""
        try:
            said = _Said.model_validate(parse_strict(text))
            placements = [words.placement() for words in said.placements]
            tensors, beside = (
                {name: placements[number] for name, number in named.items()} for named in (said.tensors, said.beside)
            )
        except ValidationError as error:
            raise InputError(f"its layout: {describe_faults(error)}") from None
        except (InputError, IndexError, ValueError) as error:
            raise InputError(f"its layout: {error}") from None
        return cls(said.replica, tensors, beside, said.dtypes, said.own_names, said.same)


class _Cut(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    dim: int = Size
    parts: int | tuple[int, ...]
    index: int = Size
    size: int = Field(ge=1)


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: tuple[int, ...]
    local: tuple[int, ...]
    offsets: tuple[int, ...]
    cut: _Cut | None = None
    span: tuple[int, int] | None = None

    def placement(self) -> Placement:
        """Return what the words stand for; raises `ValueError` where they contradict themselves."""
        dims = len(self.shape)
        if len(self.local) != dims or len(self.offsets) != dims or (self.cut is not None and self.cut.dim >= dims):
            raise ValueError(f"a placement in {dims} dimensions has others")
        if min((*self.shape, *self.local, *self.offsets, *(self.span or ())), default=0) < 0:
            raise ValueError("a placement has a size below 0")
        shard = None if self.cut is None else Shard(**dict(self.cut))
        return Placement(self.shape, self.local, self.offsets, shard, self.span)


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1]
    replica: tuple[int, int]
    placements: list[_Words]
    tensors: dict[str, int]
    beside: dict[str, int]
    dtypes: dict[str, Annotated[str, Field(pattern="^[a-z0-9_]{1,40}$")]]
    own_names: dict[str, str]
    same: list[list[str]]


def _to_words(placement: Placement) -> dict[str, Any]:
    shard = placement.shard
    words: dict[str, Any] = {
        "shape": placement.shape,
        "local": placement.local,
        "offsets": placement.offsets,
    }
    if shard is not None:
        words["cut"] = {"dim": shard.dim, "parts": shard.parts, "index": shard.index, "size": shard.size}
    return words if placement.span is None else {**words, "span": placement.span}


def layout_of(exchange: Exchange, averages: Sequence[WeightAverage]) -> StateLayout:
    """Return how what `Engine.state_dict` gives of a rank lies in the whole model."""
    found: dict[str, Placement] = {}
    beside: dict[str, Placement] = {}
    trained = {
        name: (stage.index, parameter)
        for stage in exchange.model.stages.values()
        for name, parameter in stage.named_weights().items()
    }
    held = exchange.held()
    for one in held:
        if one.numbers is None:
            continue
        mine = stored(one.placement, one.numbers)
        found[f"model.{one.name}"] = mine
        if one.name not in trained:
            continue
        for number, average in enumerate(averages):
            if average.of(one.name) is not None:
                found[f"ema.{number}.{one.name}"] = mine
        kept = exchange.state.kept_for(*trained[one.name])
        of_weight, shape = (mine, one.numbers.shape) if kept.is_shard else (mine.gathered(), torch.Size(mine.shape))
        for key, value in flat_of(kept.state, one.name).items():
            if value.dim():
                homes = found if value.shape == shape and not is_text(key) else beside
                homes[f"optimizer.{one.name}.{key}"] = of_weight
    names, own = exchange.names, exchange.names.own or {}
    return StateLayout(
        (exchange.model.replica, exchange.model.num_replicas),
        {name: placement for name, placement in found.items() if not is_plain(placement)},
        {name: placement for name, placement in beside.items() if not placement.is_whole},
        {
            f"model.{one.name}": str(one.tensor.dtype).removeprefix("torch.")
            for one in held
            if one.numbers is not None and one.numbers.dtype != one.tensor.dtype
        },
        {name: own[name] for name in (one.name for one in held) if own.get(name, name) != name},
        [list(group) for group in names.same()],
    )


def stored(placement: Placement, numbers: Tensor) -> Placement:
    """Return how numbers lie in the full tensor as a file has them: without a span where they have their shape."""
    return replace(placement, span=None) if tuple(numbers.shape) == placement.local else placement


def is_plain(placement: Placement) -> bool:
    """Whether a file has the full tensor, in its shape."""
    return placement.is_whole and placement.span is None
